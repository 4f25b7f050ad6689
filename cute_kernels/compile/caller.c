/* Loaded kernels as functions of CPython.
 *
 * tvm_ffi's own call wraps each tensor in two objects that live as long as the call. Here torch's exchange table lends the tensors'
 * descriptions, so a call allocates nothing. Whatever is not a tensor, number or flag, or is refused by the kernel's own checks, goes
 * the usual way, which says what was wrong: nothing has been launched then.
 *
 * Which kernel serves a call depends on sizes, dtypes and flags. Python chooses once for each set of them; a family remembers the
 * choice under what the descriptions say anyway, so that a call neither asks tensors for sizes in Python nor looks up.
 *
 * Compiled without Python's headers: all that is used of them is part of the stable interface.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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
extern const char PyBool_Type[], PyCFunction_Type[], PyFloat_Type[], PyLong_Type[];
extern void* PyCFunction_GetFunction(PyObject*);
extern PyObject* PyCFunction_GetSelf(PyObject*);
extern PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
extern PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
extern void* PyCapsule_GetPointer(PyObject*, const char*);
extern PyObject* PyErr_Occurred(void);
extern void PyErr_Clear(void);
extern void* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void*);
extern double PyFloat_AsDouble(PyObject*);
extern long long PyLong_AsLongLong(PyObject*);
extern PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
extern void Py_DecRef(PyObject*);
extern void Py_IncRef(PyObject*);

#ifndef DEVICE
#define DEVICE kDLCUDA
#endif
enum { MOST = 32, FASTCALL = 0x80, REMEMBERED = 256, WORDS = 8 * MOST };
static const char NAME[] = "compact_state.kernel", FAMILY[] = "compact_state.family";

typedef struct {
  const DLPackExchangeAPI* exchange;
  const PyObject *tensor, *parameter; /* the two types whose instances are lent */
} Lender;

typedef struct {
  TVMFFISafeCallType function;
  Lender lender;
  PyObject* usual;
} Kernel;

typedef struct {
  TVMFFIAny values[MOST];
  DLTensor lent[MOST];
  intptr_t count;
  int32_t device; /* of the first tensor on one, or -1 */
} Arguments;

/* One argument; 0 where it is to go the usual way. */
static int take(const Lender* lender, PyObject* given, TVMFFIAny* argument, DLTensor* lent) {
  argument->zero_padding = 0;
  if (given->type == lender->tensor || given->type == lender->parameter) {
    argument->type_index = kTVMFFIDLTensorPtr;
    argument->v_ptr = lent;
    return lender->exchange->dltensor_from_py_object_no_sync(given, lent) == 0;
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

static int take_all(const Lender* lender, PyObject* const* given, intptr_t count, Arguments* all) {
  if (count > MOST) return 0;
  all->count = count;
  all->device = -1;
  for (intptr_t i = 0; i < count; i++) {
    if (!take(lender, given[i], &all->values[i], &all->lent[i])) return 0;
    if (all->device < 0 && all->values[i].type_index == kTVMFFIDLTensorPtr && all->lent[i].device.device_type == DEVICE)
      all->device = all->lent[i].device.device_id;
  }
  return all->device >= 0;
}

/* Whether the kernel was launched, on torch's current stream of the tensors' device. */
static int launch(const Kernel* kernel, const Arguments* all) {
  TVMFFIAny result = {0};
  void *stream = 0, *before = 0;
  if (kernel->lender.exchange->current_work_stream(DEVICE, all->device, &stream)) return 0;
  if (TVMFFIEnvSetStream(DEVICE, all->device, stream, &before)) return 0;
  void* thread = PyEval_SaveThread(); /* a full queue makes a launch wait */
  int status = kernel->function(0, all->values, (int32_t)all->count, &result);
  PyEval_RestoreThread(thread);
  if (before != stream) TVMFFIEnvSetStream(DEVICE, all->device, before, 0);
  return status == 0;
}

static PyObject* launched(void) {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

static PyObject* call(PyObject* self, PyObject* const* given, intptr_t count) {
  const Kernel* kernel = PyCapsule_GetPointer(self, NAME);
  Arguments all;
  if (take_all(&kernel->lender, given, count, &all) && launch(kernel, &all)) return launched();
  PyErr_Clear();
  return PyObject_Vectorcall(kernel->usual, given, (size_t)count, 0);
}

/* A choice that was made: the kernel, and what the call said that Python chose it for. */
typedef struct {
  const Kernel* kernel;
  uint64_t* words;
  intptr_t count;
} Choice;

typedef struct {
  Lender lender;
  PyObject* choose;
  intptr_t count, next, last;
  Choice choices[REMEMBERED];
} Family;

/* Kind, dtype and sizes of every argument, the value of what is no tensor; 0 where that is too long. */
static intptr_t describe(const Arguments* all, uint64_t* words) {
  intptr_t n = 1;
  words[0] = (uint64_t)all->count << 32 | (uint32_t)all->device;
  for (intptr_t i = 0; i < all->count; i++) {
    const TVMFFIAny* value = &all->values[i];
    const DLTensor* tensor = &all->lent[i];
    int is_tensor = value->type_index == kTVMFFIDLTensorPtr, sizes = is_tensor ? tensor->ndim : 1;
    if (n + 1 + sizes > WORDS) return 0;
    words[n++] = (uint64_t)(uint32_t)value->type_index << 32 |
                 (is_tensor ? (uint32_t)tensor->ndim << 16 | tensor->dtype.code << 8 | tensor->dtype.bits : 0);
    if (is_tensor)
      for (int d = 0; d < sizes; d++) words[n++] = (uint64_t)tensor->shape[d];
    else
      words[n++] = (uint64_t)value->v_int64;
  }
  return n;
}

static int same(const Choice* choice, const uint64_t* words, intptr_t count) {
  return choice->count == count && !memcmp(choice->words, words, (size_t)count * sizeof *words);
}

static const Kernel* remembered(Family* family, const uint64_t* words, intptr_t count) {
  if (family->count && same(&family->choices[family->last], words, count)) return family->choices[family->last].kernel;
  for (intptr_t i = 0; i < family->count; i++)
    if (same(&family->choices[i], words, count)) {
      family->last = i;
      return family->choices[i].kernel;
    }
  return 0;
}

/* Keep a choice; the oldest makes room. */
static void remember(Family* family, const Kernel* kernel, const uint64_t* words, intptr_t count) {
  uint64_t* kept = malloc((size_t)count * sizeof *words);
  if (!kept) return;
  memcpy(kept, words, (size_t)count * sizeof *words);
  Choice* choice = &family->choices[family->next];
  if (family->next < family->count)
    free(choice->words);
  else
    family->count++;
  *choice = (Choice){kernel, kept, count};
  family->next = (family->next + 1) % REMEMBERED;
}

static PyObject* call_family(PyObject* self, PyObject* const* given, intptr_t count) {
  Family* family = PyCapsule_GetPointer(self, FAMILY);
  Arguments all;
  uint64_t words[WORDS];
  intptr_t said = take_all(&family->lender, given, count, &all) ? describe(&all, words) : 0;
  const Kernel* kernel = said ? remembered(family, words, said) : 0;
  if (kernel) {
    if (launch(kernel, &all)) return launched();
    PyErr_Clear();
    return PyObject_Vectorcall(kernel->usual, given, (size_t)count, 0);
  }
  PyErr_Clear();
  PyObject* function = PyObject_Vectorcall(family->choose, given, (size_t)count, 0);
  if (!function) return 0;
  int ours = function->type == (const void*)PyCFunction_Type && PyCFunction_GetFunction(function) == (void*)call;
  if (ours && said) remember(family, PyCapsule_GetPointer(PyCFunction_GetSelf(function), NAME), words, said);
  PyObject* result = PyObject_Vectorcall(function, given, (size_t)count, 0);
  Py_DecRef(function);
  return result;
}

static PyMethodDef METHOD = {"kernel", call, FASTCALL, 0}, FAMILY_METHOD = {"family", call_family, FASTCALL, 0};

/* Fills in who lends; whether torch lends tensors at all. */
static int lends(PyObject* exchange, PyObject* tensor, PyObject* parameter, Lender* lender) {
  const DLPackExchangeAPI* table = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  *lender = (Lender){table, tensor, parameter};
  PyErr_Clear();
  return table && table->header.version.major == DLPACK_MAJOR_VERSION && table->dltensor_from_py_object_no_sync;
}

/* The function of a kernel, for the life of the process; `usual` itself where torch lends no tensors. Called through ctypes. */
PyObject* compact_state_caller(void* function, PyObject* exchange, PyObject* tensor, PyObject* parameter, PyObject* usual) {
  Kernel* kernel = malloc(sizeof *kernel);
  Py_IncRef(usual);
  if (!kernel || !lends(exchange, tensor, parameter, &kernel->lender)) {
    free(kernel);
    return usual;
  }
  kernel->function = (TVMFFISafeCallType)function;
  kernel->usual = usual;
  return PyCFunction_NewEx(&METHOD, PyCapsule_New(kernel, NAME, 0), 0);
}

static void drop(PyObject* capsule) {
  Family* family = PyCapsule_GetPointer(capsule, FAMILY);
  for (intptr_t i = 0; i < family->count; i++) free(family->choices[i].words);
  Py_DecRef(family->choose);
  free(family);
}

/* A function that calls what `choose(*arguments)` returns and asks again only for other sizes, dtypes or values. None: not here. */
PyObject* compact_state_family(PyObject* exchange, PyObject* tensor, PyObject* parameter, PyObject* choose) {
  Family* family = calloc(1, sizeof *family);
  if (!family || !lends(exchange, tensor, parameter, &family->lender)) {
    free(family);
    return launched();
  }
  Py_IncRef(choose);
  family->choose = choose;
  PyObject* capsule = PyCapsule_New(family, FAMILY, drop);
  PyObject* function = PyCFunction_NewEx(&FAMILY_METHOD, capsule, 0);
  Py_DecRef(capsule);
  return function;
}
