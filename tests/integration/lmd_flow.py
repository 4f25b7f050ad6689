"""lmdeploy's own scheduler, trie, input maker, engine loop and step inputs, patched, over a device of host records.

The device keeps in each slot the tokens whose state the slot holds, and in each KV block the tokens written there. It runs
forwards in order and as late as possible, and it stops the test when a row's state is not that of exactly its own
tokens: premature reuse of a slot or block shows as data, whatever caused it.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from compact_state.integration import envs, install

_enabled_before = os.environ.get(envs.ENABLE)
install()
if _enabled_before is None:
    del os.environ[envs.ENABLE]  # other tests of this process start children, which are off unless they say so

from lmdeploy.pytorch.config import CacheConfig, ModelConfig, SchedulerConfig  # noqa: E402
from lmdeploy.pytorch.disagg.config import EngineRole  # noqa: E402
from lmdeploy.pytorch.engine.engine_loop import EngineLoop, EngineLoopConfig  # noqa: E402
from lmdeploy.pytorch.engine.inputs_maker import InputsMakerAsync, InputsMakerConfig  # noqa: E402
from lmdeploy.pytorch.engine.model_agent.agent import BatchedOutputs  # noqa: E402
from lmdeploy.pytorch.messages import MessageStatus, SamplingParam, SequenceMeta, UpdateTokenMode  # noqa: E402
from lmdeploy.pytorch.multimodal.data_type import MultiModalData  # noqa: E402
from lmdeploy.pytorch.paging.scheduler import Scheduler  # noqa: E402
from lmdeploy.pytorch.strategies.ar import ARStrategyFactory  # noqa: E402
from lmdeploy.pytorch.strategies.ar_spec import ARSpecStrategyFactory  # noqa: E402

BLOCK = 64
VOCABULARY = 50
SHAPES = [((3, 1024, 4), torch.bfloat16), ((3, 4, 128, 128), torch.bfloat16)]


def shapes(drafts: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """lmdeploy's state shapes: with drafts every slot would be `1 + drafts` states wide."""
    if not drafts:
        return SHAPES
    return [((3, 1024, 4 + drafts), torch.bfloat16), ((3, 1 + drafts, 4, 128, 128), torch.bfloat16)]


def next_token(tokens: tuple[int, ...], epoch: int = 0) -> int:
    """The model: the next token depends on every token of the state, and on the weights."""
    value = 17 + epoch
    for token in tokens:
        value = (value * 31 + token) % 1_000_003
    return value % VOCABULARY + 2


class Device:
    """Executes queued forwards on host records; `slots[s]` = tokens of the state in slot s, None = garbage."""

    device_type = "cpu"
    #: Whether `slots` is kept: what it holds is compared with what the index says.
    records = True
    #: Columns of the ids.
    width = 2

    def __init__(self, num_slots: int, factory: Any) -> None:
        self.slots: list[tuple[int, ...] | None] = [None] * num_slots
        self.kv: dict[int, dict[int, int]] = {}
        self.queue: deque[dict[str, Any]] = deque()
        self.factory = factory
        self.step_inputs = factory.build_step_inputs()
        self.forwards: list[dict[str, Any]] = []
        self.epoch = 0
        self.copies = 0

    async def forward_async(self, forward_inputs: dict[str, Any]) -> None:
        self.queue.append(dict(forward_inputs))

    async def get_output_async(self) -> BatchedOutputs:
        return self.run(self.queue.popleft())

    def lose_memory(self) -> None:
        """Sleep: pools are dropped; forwards that were queued have run."""
        while self.queue:
            self.run(self.queue.popleft())
        self.slots = [None] * len(self.slots)
        self.kv.clear()
        self.step_inputs = self.factory.build_step_inputs()

    @torch.inference_mode()
    def run(self, work: dict[str, Any]) -> BatchedOutputs:
        inputs, delta = work["inputs"], work["delta"]
        if delta is not None:
            delta = delta.to_device("cpu")
        decoding = inputs is None
        sampling, stopping, extra = work["sampling_inputs"], work["stopping_criteria"], work["extra_inputs"]
        if delta is not None:
            self.step_inputs.reindex(delta)
        if decoding:
            steps = self.step_inputs
            inputs, extra, stopping = steps.model_inputs, steps.extra_inputs, steps.stopping_criteria
            sampling.update_delta(steps.sampling_delta)
        answers = self._forward(inputs, work["cache_inputs"])
        tokens, shown, extra, extra_outputs = self._sampled(inputs, extra, answers)
        stopped, stop_pos, stopping = stopping.step(tokens, sampling.stop_words, inputs=inputs, extra_inputs=extra)
        outputs = BatchedOutputs(next_token_ids=shown, stopped=stopped, stop_pos=stop_pos, extra_outputs=extra_outputs)
        sampling_delta = sampling.get_delta()
        arguments = (inputs, extra, stopping, sampling_delta, tokens, None, extra_outputs)
        if decoding:
            self.step_inputs.step_decode(*arguments)
        elif not inputs.is_chunk or inputs.is_last_chunk:
            self.step_inputs.merge_prefill(*arguments)
        return outputs

    def _sampled(self, inputs: Any, extra: Any, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
        """The next token of each row, the tokens that the scheduler is shown, and what a strategy carries along."""
        return answers, answers, extra, None

    def _history(self, ids: list[int], held: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens before a row's own, from what its read slot holds."""
        return held

    def _kept(self, inputs: Any, ids: list[int], before: tuple[int, ...], piece: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens whose state a row writes."""
        return before + piece

    def _answers(self, inputs: Any, contexts: list[tuple[int, ...]]) -> torch.Tensor:
        """What the model says after each row."""
        return torch.tensor([next_token(context, self.epoch) for context in contexts])

    def _forward(self, inputs: Any, cache_inputs: Any) -> torch.Tensor:
        """The model's answers to one forward."""
        assert inputs.state_offsets.shape == (len(inputs.seq_length), self.width)
        assert inputs.state_offsets.dtype == torch.int32
        exports = getattr(cache_inputs, "exports", None)
        if cache_inputs is not None:
            cache_inputs = cache_inputs.to_device("cpu")
            assert cache_inputs.state_restore_plan is None
            assert cache_inputs.state_save_plan is None
            self._copy(cache_inputs.kv_restore_plan)
        ids = inputs.state_offsets.tolist()
        pieces = torch.split(inputs.input_ids[0], inputs.seq_length.tolist())
        loads = [() if read < 0 else self.slots[read] for read, *_ in ids]
        contexts: list[tuple[int, ...]] = []
        stores: dict[int, tuple[int, ...]] = {}
        for row, (piece, before) in enumerate(zip(pieces, loads)):
            history = int(inputs.history_lengths[row])
            assert before is not None, f"row {row} reads garbage"
            before, new = self._history(ids[row], before), tuple(piece.tolist())
            assert len(before) == history, f"row {row}: state of {len(before)} tokens, history of {history}"
            context = before + new
            blocks = inputs.block_offsets[row].tolist()
            for position in range(history):
                held = self.kv.get(blocks[position // BLOCK], {}).get(position % BLOCK)
                assert held == context[position], f"row {row}: KV of position {position} is not its token"
            for position in range(history, len(context)):
                self.kv.setdefault(blocks[position // BLOCK], {})[position % BLOCK] = context[position]
            if exports is not None:
                first, last = exports.cu[row : row + 2].tolist()
                for end, slot in zip(exports.ends[first:last].tolist(), exports.slots[first:last].tolist()):
                    assert slot not in stores
                    stores[slot] = context[: history + end]
            write = ids[row][1]
            assert write >= 0
            assert write not in stores, "two rows write one slot"
            stores[write] = self._kept(inputs, ids[row], before, new)
            contexts.append(context)
        for row, (read, *_) in enumerate(ids):
            writers = [other for other, (_, write, *_) in enumerate(ids) if write == read]
            assert read < 0 or writers in ([], [row]), "a row writes a slot that another one reads"
        for slot, context in stores.items():
            self.slots[slot] = context
        if cache_inputs is not None:
            self._copy(cache_inputs.kv_save_plan)
        self.forwards.append({"ids": ids, "lengths": inputs.seq_length.tolist(), "exports": exports})
        return self._answers(inputs, contexts)

    def _copy(self, plan: torch.Tensor | None) -> None:
        if plan is None:
            return
        for source, target in plan.t().tolist():
            self.kv[target] = dict(self.kv.get(source, {}))
            self.copies += 1


class Flow:
    """One engine without an engine: `add`, `cancel`, `step` until `idle`, `sleep`, `wake`, `update_weights`."""

    def __init__(
        self,
        *,
        max_batches: int = 4,
        budget: int = 8,
        num_slots: int | None = None,
        blocks: int = 256,
        prefill_tokens: int = 1024,
        caching: bool = True,
        drafts: int = 0,
        device: type[Device] = Device,
    ) -> None:
        from compact_state.integration.lmdeploy.cache import num_slots as default_slots

        slots = default_slots(max_batches, budget) if num_slots is None else num_slots
        model_config = ModelConfig(
            hidden_size=8,
            num_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            bos_token_id=0,
            eos_token_id=[1],
            head_dim=8,
        )
        cache_config = CacheConfig(
            max_batches=max_batches,
            block_size=BLOCK,
            num_cpu_blocks=0,
            num_gpu_blocks=blocks,
            max_prefill_token_num=prefill_tokens,
            enable_prefix_caching=caching,
            prefix_cache_state_budget=budget,
            num_state_caches=slots,
            states_shapes=shapes(drafts),
        )
        scheduler_config = SchedulerConfig(max_batches=max_batches, max_session_len=1 << 16)
        spec = SimpleNamespace(num_speculative_tokens=drafts, method="qwen3_5_mtp")
        factory = ARSpecStrategyFactory(model_config, spec) if drafts else ARStrategyFactory(model_config)
        seq_strategy, sampling = factory.build_sequence_strategy(), factory.build_sampling_strategy()
        meta = SequenceMeta(BLOCK, strategy=seq_strategy, sampling_strategy=sampling)
        self.scheduler = Scheduler(scheduler_config, cache_config, seq_meta=meta)
        self.device = device(slots, factory)
        maker_config = InputsMakerConfig(
            max_batches=max_batches,
            max_prefill_token_num=prefill_tokens,
            role=EngineRole.Hybrid,
            block_size=BLOCK,
            kernel_block_size=BLOCK,
            window_size=-1,
            enable_prefix_caching=caching,
            prefix_cache_decode_state_interval=0,
            is_ssm=True,
            spec_decoding=drafts > 0,
        )
        adapters = mock.Mock()
        adapters.num_adapters.return_value = 1
        self.maker = InputsMakerAsync(
            executor=self.device,
            scheduler=self.scheduler,
            state_checkpoints=self.scheduler.state_checkpoints,
            adapter_manager=adapters,
            engine_strategy=factory.build_engine_strategy(cache_config, scheduler_config),
            sampling_strategy=sampling,
            model_agent_strategy=factory.build_model_agent_strategy(),
            config=maker_config,
        )
        self.loop = EngineLoop(
            req_manager=mock.Mock(),
            scheduler=self.scheduler,
            state_checkpoints=self.scheduler.state_checkpoints,
            executor=self.device,
            seq_strategy=seq_strategy,
            inputs_maker=self.maker,
            config=EngineLoopConfig(role=EngineRole.Hybrid),
        )
        self._next: tuple[Any, Any] = (None, None)
        self._events = asyncio.new_event_loop()
        self.sessions = 0

    @property
    def manager(self) -> Any:
        return self.scheduler.state_manager

    @property
    def ledger(self) -> Any:
        return self.scheduler.state_manager.ledger

    @property
    def checkpoints(self) -> list[int]:
        """Positions of the published checkpoints."""
        return sorted(r.position for r in self.ledger.records if r.entry is not None)

    def add(self, tokens: Sequence[int], new: int = 4, image: tuple[int, int, str] | None = None) -> Any:
        """A request of its own session; `image`: first position, position behind the last, hash of the content."""
        self.sessions += 1
        session = self.scheduler.add_session(self.sessions)
        media = None
        if image is not None:
            start, end, content = image
            media = {"image": [MultiModalData(torch.zeros(1), start, end, content_hash=content)]}
        seq = session.add_sequence(list(tokens), sampling_param=SamplingParam(max_new_tokens=new), multimodals=media)
        seq.resp = mock.Mock(data=None, is_done=False, _input_logprobs=None)
        return seq

    def go_on(self, seq: Any, tokens: Sequence[int], new: int = 4) -> None:
        """The next turn of a session whose sequence has stopped."""
        seq.update_token_ids(torch.tensor(list(tokens)).numpy(), mode=UpdateTokenMode.INPUTS)
        seq.sampling_param = SamplingParam(max_new_tokens=new)
        seq.state.activate()

    def end(self, seq: Any) -> None:
        """The client is done with (or gone from) the session."""
        self.scheduler.end_session(seq.session_id)

    def cancel(self, seq: Any) -> None:
        self.scheduler.stop_session(seq.session_id)
        self.end(seq)

    def step(self) -> bool:
        """One turn of the engine's main loop. False: there was nothing to do."""
        return self._events.run_until_complete(self._step())

    async def _step(self) -> bool:
        forward_inputs, running = self._next
        if running is None:
            if not self.loop.has_runable_event.has_unfinished() and not self.maker.running_seqs:
                return False
            forward_inputs, running = await self.maker.send_next_inputs()
            if running is None:
                self._next = (None, None)
                return False
        self.scheduler.activate_seqs(running)
        self._next = await self.loop._main_loop_get_outputs(running=running, forward_inputs=forward_inputs)
        self.maker.preempt_invalid_decode_seqs()
        self.ledger_is_sound()
        return True

    def run(self, limit: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.step():
                assert self.ledger.done == self.ledger.submitted, "a fence is missing"
                return
        raise AssertionError("the flow does not come to an end")

    def serve(self, tokens: Sequence[int], new: int = 4, image: tuple[int, int, str] | None = None) -> Any:
        """One request alone, to its end; the session stays open."""
        seq = self.add(tokens, new, image)
        self.run()
        assert seq.status == MessageStatus.STOPPED
        return seq

    def ledger_is_sound(self) -> None:
        """Every invariant of the ledger, and the trie and the ledger agree."""
        from compact_state.pool.invariants import check

        check(self.ledger)
        index = self.scheduler.block_trie._checkpoint_index
        cached = {r.slot for r in self.ledger.records if r.entry is not None}
        nodes = list(index.unique_nodes())
        assert {node.state_checkpoint.slot for node in nodes} == cached
        assert all(node.state_checkpoint.published for node in nodes)
        for node in nodes:
            data = node.state_checkpoint.exact_match_data
            held = self.device.slots[node.state_checkpoint.slot]
            if self.device.records and not self.device.queue:
                assert held == tuple(data.token_ids.tolist()), "a checkpoint holds another state than its key names"

    async def _sleep(self) -> None:
        # What Engine.sleep does, with the loop at its drain point.
        if self._next[1] is not None:
            await self.device.get_output_async()
        self._next = (None, None)
        for session in list(self.scheduler.get_sessions()):
            self.scheduler.end_session(session.session_id)
        self.device.lose_memory()
        self.loop.reset_runtime_state()

    def sleep(self) -> None:
        """Engine.sleep with its scheduler side real."""
        from lmdeploy.pytorch.engine.engine import Engine

        engine = mock.Mock(spec=["scheduler", "_sleeping_tags", "_engine_loop", "executor"])
        engine.scheduler, engine._engine_loop = self.scheduler, None
        engine._block_new_inputs = engine._cancel_and_end_all_sessions = lambda: None
        self._events.run_until_complete(self._sleep())
        engine.executor.sleep = mock.AsyncMock()
        self._events.run_until_complete(Engine.sleep(engine))

    def wake(self, tags: list[str] | None = None) -> None:
        from lmdeploy.pytorch.engine.engine import Engine

        engine = mock.Mock(spec=["scheduler", "_sleeping_tags", "_engine_loop", "executor"])
        engine.scheduler, engine._engine_loop, engine._sleeping_tags = self.scheduler, None, {"weights", "kv_cache"}
        engine._unblock_new_inputs = lambda: None
        Engine.wakeup(engine, tags)

    def update_weights(self) -> None:
        """Engine.update_params; the device has other weights from here on."""
        from lmdeploy.pytorch.engine.engine import Engine

        engine = mock.Mock(spec=["scheduler", "executor"])
        engine.scheduler = self.scheduler

        def update(request: object) -> None:
            self.device.epoch += 1

        engine.executor.update_params = update
        Engine.update_params(engine, None)
