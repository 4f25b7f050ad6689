/* Loaded kernels as functions of CPython.
 *
 * tvm_ffi's own call wraps each tensor in two objects that live as long as the call. Here torch's exchange table lends the tensors'
 * descriptions, so a call allocates nothing. Whatever is not a tensor, number or flag, or is refused by the kernel's own checks, goes
 * the usual way, which says what was wrong: nothing has been launched then.
 *
 * Compiled without Python's headers: all that is used of them is part of the stable interface.
 */
#include <stdint.h>
#include <stdlib.h>

#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

typedef struct {
  intptr_t references;
  const void* type;
} PyObject;

typedef struct {
  const char* name;
  PyObject* (*call)(PyObject*, PyObject* const*, intptr_t);
  int flags;
  const char* doc;
} PyMethodDef;

extern PyObject _Py_NoneStruct;
extern const char PyBool_Type[], PyFloat_Type[], PyLong_Type[];
extern PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
extern PyObject* PyCapsule_New(void*, const char*, void*);
extern void* PyCapsule_GetPointer(PyObject*, const char*);
extern PyObject* PyErr_Occurred(void);
extern void PyErr_Clear(void);
extern void* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void*);
extern double PyFloat_AsDouble(PyObject*);
extern long long PyLong_AsLongLong(PyObject*);
extern PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
extern void Py_IncRef(PyObject*);

#ifndef DEVICE
#define DEVICE kDLCUDA
#endif
enum { MOST = 32, FASTCALL = 0x80 };
static const char NAME[] = "compact_state.kernel";

typedef struct {
  TVMFFISafeCallType function;
  const DLPackExchangeAPI* exchange;
  const PyObject *tensor, *parameter; /* the two types whose instances are lent */
  PyObject* usual;
} Kernel;

/* One argument; 0 where it is to go the usual way. */
static int take(const Kernel* kernel, PyObject* given, TVMFFIAny* argument, DLTensor* lent) {
  argument->zero_padding = 0;
  if (given->type == kernel->tensor || given->type == kernel->parameter) {
    argument->type_index = kTVMFFIDLTensorPtr;
    argument->v_ptr = lent;
    return kernel->exchange->dltensor_from_py_object_no_sync(given, lent) == 0;
  }
  if (given->type == PyFloat_Type) {
    argument->type_index = kTVMFFIFloat;
    argument->v_float64 = PyFloat_AsDouble(given);
    return 1;
  }
  if (given->type == PyLong_Type || given->type == PyBool_Type) {
    argument->type_index = given->type == PyBool_Type ? kTVMFFIBool : kTVMFFIInt;
    argument->v_int64 = PyLong_AsLongLong(given);
    return argument->v_int64 != -1 || !PyErr_Occurred();
  }
  argument->type_index = kTVMFFINone;
  argument->v_int64 = 0;
  return given == &_Py_NoneStruct;
}

/* Whether the kernel was launched, on torch's current stream of the tensors' device. */
static int launch(const Kernel* kernel, PyObject* const* given, intptr_t count) {
  TVMFFIAny arguments[MOST], result = {0};
  DLTensor lent[MOST];
  int32_t device = -1;
  if (count > MOST) return 0;
  for (intptr_t i = 0; i < count; i++) {
    if (!take(kernel, given[i], &arguments[i], &lent[i])) return 0;
    if (device < 0 && arguments[i].type_index == kTVMFFIDLTensorPtr && lent[i].device.device_type == DEVICE)
      device = lent[i].device.device_id;
  }
  void *stream = 0, *before = 0;
  if (device < 0 || kernel->exchange->current_work_stream(DEVICE, device, &stream)) return 0;
  if (TVMFFIEnvSetStream(DEVICE, device, stream, &before)) return 0;
  void* thread = PyEval_SaveThread(); /* a full queue makes a launch wait */
  int status = kernel->function(0, arguments, (int32_t)count, &result);
  PyEval_RestoreThread(thread);
  if (before != stream) TVMFFIEnvSetStream(DEVICE, device, before, 0);
  return status == 0;
}

static PyObject* call(PyObject* self, PyObject* const* given, intptr_t count) {
  const Kernel* kernel = PyCapsule_GetPointer(self, NAME);
  if (launch(kernel, given, count)) {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
  }
  PyErr_Clear();
  return PyObject_Vectorcall(kernel->usual, given, (size_t)count, 0);
}

static PyMethodDef METHOD = {"kernel", call, FASTCALL, 0};

/* The function of a kernel, for the life of the process; `usual` itself where torch lends no tensors. Called through ctypes. */
PyObject* compact_state_caller(void* function, PyObject* exchange, PyObject* tensor, PyObject* parameter, PyObject* usual) {
  Kernel* kernel = malloc(sizeof *kernel);
  const DLPackExchangeAPI* table = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  Py_IncRef(usual);
  if (!kernel || !table || table->header.version.major != DLPACK_MAJOR_VERSION || !table->dltensor_from_py_object_no_sync) {
    PyErr_Clear();
    free(kernel);
    return usual;
  }
  *kernel = (Kernel){(TVMFFISafeCallType)function, table, tensor, parameter, usual};
  return PyCFunction_NewEx(&METHOD, PyCapsule_New(kernel, NAME, 0), 0);
}
