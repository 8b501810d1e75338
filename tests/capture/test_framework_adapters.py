"""Adapters of Megatron-Core, DeepSpeed, FairScale, torchft, torchrec, RPC, on modules by hand with their names."""

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dtprof.analysis.memory.memory_formulas import ModelShare, compare_with_formula
from dtprof.capture import group_descriptions, reduction_buffers
from dtprof.capture.frameworks import FRAMEWORKS, Adapter
from dtprof.capture.frameworks import attribution as of_attribution
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.frameworks.deepspeed_hooks import DeepSpeed
from dtprof.capture.frameworks.fairscale_hooks import FairScale
from dtprof.capture.frameworks.megatron_hooks import Megatron
from dtprof.capture.frameworks.rpc_hooks import RemoteCalls
from dtprof.capture.frameworks.torchft_hooks import TorchFt
from dtprof.capture.frameworks.torchrec_hooks import TorchRec
from dtprof.capture.group_descriptions import name_of, named_axis_entry

F, B = "pp_forward", "pp_backward"


class Recorder:
    """Keeps entries, and spans by name, stage and microbatch in the order of their begins."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.spans: list[tuple[str, int, int]] = []
        self.num_open = 0
        self.label = 0

    def set_label(self, label: int) -> int:
        before, self.label = self.label, label
        return before

    def label_text(self) -> str:
        """Return the text of the label that operations now have."""
        return next((entry["text"] for entry in self.of("label") if entry["id"] == self.label), "")

    def write_entry(self, line: str) -> None:
        self.entries.append(json.loads(line))

    def name_id(self, name: str) -> Any:
        return name

    def begin_span(self, name: Any, _: bool, stage: int, microbatch: int) -> int:
        self.spans.append((name, stage, microbatch))
        self.num_open += 1
        return len(self.spans)

    def end_span(self, *_: Any) -> None:
        self.num_open -= 1

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["k"] == kind]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def attribution(recorder: Recorder) -> Attribution:
    return Attribution(lambda _: recorder)  # type: ignore[arg-type,return-value]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes a module importable until the end of the test; one that was there comes back."""

    def make(name: str, **members: Any) -> Any:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


class Group:
    """A process group."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.group_name, self._rank, self._size = name, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


MEGATRON = """
def forward_step(number, vp_stage=None): return [number], 1
def backward_step(input_tensor, output_tensor, output_tensor_grad): return None
def _act(acts):
    outputs = {}
    for kind, chunk, number in acts:
        if kind == "F": outputs[chunk, number], _ = forward_step(number, vp_stage=chunk)
        else: backward_step(None, outputs.pop((chunk, number)), None)
def forward_backward_pipelining_without_interleaving(*, acts, model, num_microbatches, forward_only=False): _act(acts)
def forward_backward_pipelining_with_interleaving(*, acts, model, num_microbatches, forward_only=False): _act(acts)
"""


def megatron(
    modules: Callable[..., Any], rank: int, size: int, text: str = MEGATRON, core: str = "megatron.core"
) -> Any:
    state = modules(f"{core}.parallel_state", get_pipeline_model_parallel_group=lambda: Group("7", rank, size))
    schedules = modules(f"{core}.pipeline_parallel.schedules", parallel_state=state)
    exec(text, vars(schedules))
    return schedules


def test_1f1b_of_megatron_is_recorded_with_stages_and_microbatches(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    schedules = megatron(modules, rank=0, size=2)
    Megatron(attribution).install()
    acts = [("F", None, 0), ("F", None, 1), ("B", None, 0), ("B", None, 1)]
    for _ in range(2):
        schedules.forward_backward_pipelining_without_interleaving(acts=acts, model=object(), num_microbatches=2)
    (plan,) = recorder.of("pipeline")
    wanted = {"schedule": "1F1B", "num_stages": 2, "stages": [0], "microbatches": 2, "group": "7", "group_size": 2}
    assert wanted.items() <= plan.items()
    assert plan["offered"] == ["1F1B", "Interleaved1F1B"]
    assert recorder.of("axis") == [
        {"k": "axis", "group": "7", "axis": "pp", "by": "megatron.core.pipeline_parallel"},
    ]
    assert recorder.spans == [("pp_step", -1, plan["id"]), (F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)] * 2
    assert recorder.num_open == 0


def test_interleaved_backward_passes_belong_to_the_stage_of_their_output(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    schedules = megatron(modules, rank=1, size=2)
    Megatron(attribution).install()
    acts = [("F", 0, 0), ("F", 1, 0), ("F", 0, 1), ("B", 1, 0), ("F", 1, 1), ("B", 0, 0), ("B", 1, 1), ("B", 0, 1)]
    schedules.forward_backward_pipelining_with_interleaving(acts=acts, model=[1, 2], num_microbatches=2)
    (plan,) = recorder.of("pipeline")
    assert (plan["schedule"], plan["num_stages"], plan["stages"]) == ("Interleaved1F1B", 4, [1, 3])
    assert recorder.spans[1:] == [
        (F, 1, 0), (F, 3, 0), (F, 1, 1), (B, 3, 0), (F, 3, 1), (B, 1, 0), (B, 3, 1), (B, 1, 1),
    ]  # fmt: skip


def test_evaluation_of_megatron_is_no_step_of_training(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    schedules = megatron(modules, rank=0, size=2)
    Megatron(attribution).install()
    schedules.forward_backward_pipelining_without_interleaving(
        acts=[("F", None, 0)], model=object(), num_microbatches=1, forward_only=True
    )
    assert recorder.spans == [("pp_evaluation", -1, 1), (F, 0, 0)]


def test_megatron_with_other_names_runs_unhooked_and_that_is_said_once(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    schedules = megatron(modules, rank=0, size=2, text=MEGATRON.replace("backward_step", "backward_of_stage"))
    Megatron(attribution).install()
    attribution.labels()
    schedules.forward_backward_pipelining_without_interleaving(
        acts=[("F", None, 0), ("B", None, 0)], model=object(), num_microbatches=1
    )
    assert recorder.spans == []
    assert [note["text"] for note in recorder.of("note")] == [
        "megatron has no megatron.core.pipeline_parallel.schedules.backward_step: what this version shards, or runs "
        "as a pipeline, is not recognised"
    ]


def test_distributed_optimizer_of_megatron_shards_the_state_of_the_optimizer(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    class DistributedOptimizer:
        def __init__(self, group: Any) -> None:
            if group is not None:  # a stub, for a frozen model, has none
                self.data_parallel_group = group

    modules("megatron.core.optimizer.distrib_optimizer", DistributedOptimizer=DistributedOptimizer)
    Megatron(attribution).install()
    for group in (None, Group("1", 0, 4), Group("2", 0, 2)):  # the last one: of experts
        DistributedOptimizer(group)
    assert [(entry["scheme"], entry["shards"]) for entry in recorder.of("sharding")] == [("zero1", 4), ("zero1", 2)]


def test_group_along_data_and_a_context_of_one_rank_is_data_parallel(modules: Callable[..., Any]) -> None:
    groups = {
        "_DATA_PARALLEL_GROUP": Group("1", 0, 4),
        "_DATA_PARALLEL_GROUP_WITH_CP": Group("2", 0, 4),
        "_CONTEXT_PARALLEL_GROUP": Group("3", 0, 1),
    }
    modules("megatron.core.parallel_state", **groups)
    assert json.loads(named_axis_entry("2"))["axis"] == "dp"
    groups["_DATA_PARALLEL_GROUP"], groups["_CONTEXT_PARALLEL_GROUP"] = Group("1", 0, 2), Group("3", 0, 2)
    modules("megatron.core.parallel_state", **groups)
    assert json.loads(named_axis_entry("2"))["axis"] == "dp_cp"


def test_copies_under_other_names_are_recognised_by_what_they_define(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    Megatron(attribution).install()
    DeepSpeed(attribution).install()
    FairScale(attribution).install()
    schedules = megatron(modules, rank=0, size=2, core="lab.third_party.mcore")
    # What imports the functions from elsewhere, or defines other ones under some of the names, is no copy.
    reexports = modules("lab.train", **{name: value for name, value in vars(schedules).items() if name[0] != "_"})
    others = modules("lab.own")
    exec("def forward_step(number): return [number], 1\nclass DistributedOptimizer: pass", vars(others))
    unhooked = reexports.forward_step, others.forward_step, others.DistributedOptimizer.__init__
    optimizers = modules("lab.third_party.mcore.optimizer.distrib_optimizer")
    exec(
        "class DistributedOptimizer:\n"
        "    def __init__(self, group): self.data_parallel_group = group\n"
        "    def _build_gbuf_range_map(self): ...",
        vars(optimizers),
    )
    sharded = modules("lab.sharded_ddp")
    exec(
        "class ShardedDataParallel:\n"
        "    def __init__(self, group): self._process_group = group\n"
        "    def refresh_trainable(self): ...",
        vars(sharded),
    )
    for _ in range(2):  # each is hooked once
        attribution.copies.find()
        modules(f"lab.late{_}")
    schedules.forward_backward_pipelining_without_interleaving(
        acts=[("F", None, 0), ("B", None, 0)], model=object(), num_microbatches=1
    )
    optimizers.DistributedOptimizer(Group("1", 0, 4))
    sharded.ShardedDataParallel(Group("2", 0, 4))
    assert [span[:1] for span in recorder.spans] == [("pp_step",), (F,), (B,)]
    assert [(entry["axis"], entry["by"]) for entry in recorder.of("axis")] == [
        ("pp", "lab.third_party.mcore.pipeline_parallel"), ("dp", "lab.sharded_ddp"),
    ]  # fmt: skip
    assert [(entry["scheme"], entry["by"]) for entry in recorder.of("sharding")] == [
        ("zero1", "lab.third_party.mcore.optimizer"), ("zero2", "lab.sharded_ddp"),
    ]  # fmt: skip
    assert (reexports.forward_step, others.forward_step, others.DistributedOptimizer.__init__) == unhooked


def test_groups_in_variables_of_a_copy_have_its_axes(
    attribution: Attribution, modules: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_descriptions, "_naming_modules", [])
    state = modules("lab.mpu", _TENSOR_MODEL_PARALLEL_GROUP=Group("of copy", 0, 2))
    exec("def initialize_model_parallel(): ...\ndef get_data_parallel_group(): ...", vars(state))
    Megatron(attribution).install()
    assert named_axis_entry("of copy") == ""
    attribution.copies.find()
    assert json.loads(named_axis_entry("of copy")) == {"k": "axis", "group": "of copy", "axis": "tp", "by": "lab.mpu"}


def test_modules_are_searched_without_running_their_code(attribution: Attribution, modules: Callable[..., Any]) -> None:
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    Megatron(attribution).install()
    modules("lab.lazy")
    sys.modules["lab.lazy"] = Lazy("lab.lazy")
    sys.modules["lab.nothing"] = None  # type: ignore[assignment]  # as a test that blocks an import leaves it
    try:
        attribution.copies.find()
    finally:
        del sys.modules["lab.nothing"]


COMMUNICATOR = """
class P2PCommunicator:
    def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape):
        sent.append(label_now())
"""
OLD_COMMUNICATOR = """
def _communicate(*, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape):
    sent.append(label_now())
"""


@pytest.mark.parametrize("text", [COMMUNICATOR, OLD_COMMUNICATOR])
def test_messages_of_megatron_are_labelled_as_those_of_the_pipeline(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any], text: str
) -> None:
    sent: list[str] = []
    module = modules("megatron.core.pipeline_parallel.p2p_communication", sent=sent, label_now=recorder.label_text)
    exec(text, vars(module))
    Megatron(attribution).install()
    owner = module.P2PCommunicator() if "class" in text else module
    nothing: dict[str, Any] = {"tensor_send_next": None, "tensor_send_prev": None, "tensor_shape": None}
    owner._communicate(**nothing | {"tensor_send_next": 1}, recv_prev=False, recv_next=False)
    owner._communicate(**nothing | {"tensor_send_prev": 1}, recv_prev=False, recv_next=False)
    owner._communicate(**nothing, recv_prev=True, recv_next=True)
    assert sent == ["pp activations", "pp gradients", "pp activations and gradients"]
    assert recorder.label == 0
    assert {entry["api"] for entry in recorder.of("label")} == {"pp"}


class ForwardPass:
    """An instruction of a schedule."""


class BackwardPass:
    """An instruction of a schedule."""


class SendActivation:
    """An instruction of a schedule."""


class RecvActivation:
    """An instruction of a schedule."""


class SendGrad:
    """An instruction of a schedule."""


class RecvGrad:
    """An instruction of a schedule."""


class TrainSchedule(list[Any]):
    """A schedule: instructions and their buffers."""

    micro_batches = 2


def pipeline_engine() -> Any:
    class PipelineEngine:
        stage_id, num_stages = 1, 2
        grid = SimpleNamespace(get_pipe_parallel_group=lambda: Group("3", 1, 2))

        def _exec_forward_pass(self, buffer_id: int) -> None:
            assert buffer_id >= 0

        def _exec_backward_pass(self, buffer_id: int) -> None:
            assert buffer_id >= 0

        _INSTRUCTION_MAP = {ForwardPass: _exec_forward_pass, BackwardPass: _exec_backward_pass}  # noqa: RUF012

        def _exec_schedule(self, pipe_schedule: Any) -> None:
            for kind, buffer in pipe_schedule:
                self._INSTRUCTION_MAP[kind](self, buffer_id=buffer)

    return PipelineEngine


def test_pipeline_of_deepspeed_is_recorded_by_its_buffers(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    engine = pipeline_engine()
    modules("deepspeed.runtime.pipe.engine", PipelineEngine=engine)
    DeepSpeed(attribution).install()
    acts = [(ForwardPass, 0), (ForwardPass, 1), (BackwardPass, 1), (BackwardPass, 0)]
    engine()._exec_schedule(TrainSchedule(acts))
    (plan,) = recorder.of("pipeline")
    assert (plan["schedule"], plan["stages"], plan["microbatches"], plan["group_size"]) == ("1F1B", [1], 2, 2)
    assert plan["offered"] == ["1F1B"]
    assert recorder.spans == [("pp_step", -1, plan["id"]), (F, 1, 0), (F, 1, 1), (B, 1, 1), (B, 1, 0)]
    assert recorder.num_open == 0


def test_messages_of_the_pipeline_of_deepspeed_are_labelled_with_their_stage_and_microbatch(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    """It sends them over the default group, which does not tell that they are of the pipeline."""
    engine = pipeline_engine()
    sent: list[str] = []

    def exchange(_: Any, buffer_id: int) -> None:
        assert buffer_id >= 0
        sent.append(recorder.label_text())

    engine.num_stages = 3
    engine._INSTRUCTION_MAP |= dict.fromkeys((SendActivation, RecvActivation, SendGrad, RecvGrad), exchange)
    modules("deepspeed.runtime.pipe.engine", PipelineEngine=engine)
    DeepSpeed(attribution).install()
    acts = [
        *((RecvActivation, 0), (ForwardPass, 0), (SendActivation, 0)),
        *((RecvActivation, 1), (ForwardPass, 1), (SendActivation, 1)),
        *((RecvGrad, 0), (BackwardPass, 0), (SendGrad, 0), (RecvGrad, 1), (BackwardPass, 1), (SendGrad, 1)),
    ]
    engine()._exec_schedule(TrainSchedule(acts))
    assert sent == [
        *("pp forward of stage 0, microbatch 0", "pp forward of stage 1, microbatch 0"),
        *("pp forward of stage 0, microbatch 1", "pp forward of stage 1, microbatch 1"),
        *("pp backward of stage 2, microbatch 0", "pp backward of stage 1, microbatch 0"),
        *("pp backward of stage 2, microbatch 1", "pp backward of stage 1, microbatch 1"),
    ]
    assert recorder.label == 0


def test_zero_of_deepspeed_is_recorded_with_the_group_that_it_shards_over(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    class DeepSpeedEngine:
        def __init__(
            self,
            stage: int,
            given: Any = None,
            sharded: tuple[Any, ...] = (),
            along_sequence: int = 1,
            experts: dict[str, Any] | None = None,
        ) -> None:
            self.has_moe_layers, self.expert_data_parallel_group = experts is not None, experts
            self.seq_data_parallel_group, self.data_parallel_group = None, Group("1", 0, 4)
            self.sequence_parallel_size = along_sequence
            self.optimizer = SimpleNamespace(dp_process_group=given)
            self.module = SimpleNamespace(parameters=lambda: iter(sharded))
            self._stage = stage

        def zero_optimization_stage(self) -> int:
            return self._stage

    modules("deepspeed.runtime.engine", DeepSpeedEngine=DeepSpeedEngine)
    DeepSpeed(attribution).install()
    DeepSpeedEngine(0)
    DeepSpeedEngine(1, Group("2", 0, 8), along_sequence=2)
    of_all, of_experts = Group("0", 0, 16), Group("3", 0, 2)
    dense, expert = (
        SimpleNamespace(ds_process_group=of_all),
        SimpleNamespace(ds_process_group=of_experts, allreduce=False),
    )
    DeepSpeedEngine(3, sharded=(expert, dense, dense, expert, expert, SimpleNamespace()))
    DeepSpeedEngine(2, experts={"ep_size_2": Group("5", 0, 2)})
    assert [(entry["scheme"], entry["shards"]) for entry in recorder.of("sharding")] == [
        ("none", 4), ("zero1", 8), ("zero3", 16), ("zero2", 4), ("zero2", 2),
    ]  # fmt: skip
    assert [(entry["group"], entry["axis"]) for entry in recorder.of("axis")] == [
        ("1", "dp"), ("2", "sp_dp"), ("0", "dp"),
    ]  # fmt: skip


class Zero12:
    """The optimizer of ZeRO 1 and 2, by version."""

    def __init__(self, **buffers: Any) -> None:
        self.dp_process_group = Group("1", 0, 4)
        vars(self).update(buffers)


@pytest.mark.parametrize(
    "buffers",
    [
        {"ipg_buckets": {"bf16": SimpleNamespace(buffer=["one"]), "fp32": SimpleNamespace(buffer=[])}},
        {"ipg_buffer": ["one"]},
    ],
)  # fmt: skip
def test_buffers_of_zero_are_declared(
    attribution: Attribution, modules: Callable[..., Any], buffers: dict[str, Any]
) -> None:
    class DeepSpeedEngine:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.module = optimizer, SimpleNamespace(parameters=lambda: iter(()))

        def zero_optimization_stage(self) -> int:
            return 2

    modules("deepspeed.runtime.engine", DeepSpeedEngine=DeepSpeedEngine)
    DeepSpeed(attribution).install()
    optimizer = Zero12(**buffers)
    DeepSpeedEngine(optimizer)
    assert list(reduction_buffers.held_now()) == ["one"]
    del optimizer
    assert not reduction_buffers.are_known()


def test_groups_of_torchft_join_replicas_and_stay_as_they_are(recorder: Recorder, modules: Callable[..., Any]) -> None:
    made = Group("", 0, 2)

    class ProcessGroupWrapper:
        _pg: Any = None

        def configure(self) -> None:
            self._pg = made

    has_log: list[Recorder | None] = [None]
    attribution = Attribution(lambda _: has_log[0])  # type: ignore[arg-type,return-value]
    modules("torchft.process_group", ProcessGroupWrapper=ProcessGroupWrapper)
    TorchFt(attribution).install()
    before = dict(vars(made))
    ProcessGroupWrapper().configure()
    assert recorder.entries == []
    has_log[0] = recorder  # the first operation opens the log
    ProcessGroupWrapper().configure()
    assert [(entry["axis"], entry["by"]) for entry in recorder.of("axis")] == [("dp_replicate", "torchft")]
    assert vars(made) == before


def test_group_without_a_name_is_named_by_its_object() -> None:
    class Unnamed:
        @property
        def group_name(self) -> str:
            raise ValueError("ProcessGroup name not set")

    assert name_of(Unnamed()).startswith("Unnamed 0x")


def test_calls_of_rpc_are_phases_and_a_server_that_only_joins_leaves_a_log(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    api = modules("torch.distributed.rpc.api", rpc_sync=lambda: "answer", shutdown=lambda: None)
    rpc = modules("torch.distributed.rpc", api=api, init_rpc=lambda: None, rpc_sync=api.rpc_sync)
    RemoteCalls(attribution).install()
    rpc.init_rpc()
    assert rpc.rpc_sync() == "answer"
    assert [name for name, *_ in recorder.spans] == ["phase:init_rpc", "phase:rpc_sync"]
    assert recorder.num_open == 0


@pytest.mark.parametrize("adapter", FRAMEWORKS)
def test_adapter_whose_framework_moved_its_names_notes_so_and_breaks_nothing(
    adapter: Callable[[Attribution], Adapter],
    recorder: Recorder,
    attribution: Attribution,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hooked = []

    def import_empty(name: str, hook: Callable[[Any], object]) -> None:
        hooked.append(name)
        hook(ModuleType(name))

    monkeypatch.setattr(of_attribution, "after_import", import_empty)
    adapter(attribution).install()
    attribution.labels()
    notes = [note["text"] for note in recorder.of("note")]
    assert 1 <= len(notes) == len(set(notes))
    assert all(" has no " in note for note in notes)
    assert all(any(name in note for note in notes) for name in hooked if not name.startswith("torch."))
    assert capsys.readouterr() == ("", "")


def test_oss_of_fairscale_shards_the_state_of_the_optimizer(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any]
) -> None:
    class OSS:
        def __init__(self) -> None:
            self.group = Group("0", 0, 2)

    modules("fairscale.optim.oss", OSS=OSS)
    FairScale(attribution).install()
    OSS()
    assert recorder.of("sharding") == [{"k": "sharding", "scheme": "zero1", "shards": 2, "by": "fairscale"}]


@pytest.mark.parametrize("kind", ["table_wise", "data_parallel"])
def test_torchrec_shards_embedding_tables_that_it_does_not_replicate(
    recorder: Recorder, attribution: Attribution, modules: Callable[..., Any], kind: str
) -> None:
    class DistributedModelParallel:
        def __init__(self) -> None:
            self._env = SimpleNamespace(process_group=Group("0", 0, 2))
            self._plan = SimpleNamespace(plan={"tables": {"t0": SimpleNamespace(sharding_type=kind)}})

    modules("torchrec.distributed.model_parallel", DistributedModelParallel=DistributedModelParallel)
    TorchRec(attribution).install()
    DistributedModelParallel()
    declared = [{"k": "sharding", "scheme": "tables", "shards": 2, "by": "torchrec"}]
    assert recorder.of("sharding") == (declared if kind == "table_wise" else [])


@pytest.mark.parametrize(
    ("scheme", "is_whole", "held", "formula"),
    [
        # 2 ranks, 16-bit parameters of 40 KB in all: in units of these 1 parameters, 1 gradients, 6 optimizer state.
        ("zero1", True, (40, 40, 120), 40 * (2 + 6 / 2)),
        ("zero2", True, (40, 20, 120), 40 * (1 + 7 / 2)),
        ("zero2", False, (20, 20, 120), 40 * (1 + 7 / 2)),  # FSDP holds shards of parameters between steps
        ("zero3", False, (20, 20, 120), 40 * 8 / 2),
    ],
)
def test_formula_takes_parameters_as_the_scheme_holds_them(
    scheme: str, is_whole: bool, held: tuple[int, int, int], formula: float
) -> None:
    share = ModelShare(scheme=scheme, is_known=True, shards=2, holds_whole=is_whole)
    names = ("parameters", "gradients", "optimizer_state")
    found = compare_with_formula(dict(zip(names, (1000 * size for size in held), strict=True)), share)
    assert found is not None
    assert found.state_formula_bytes == 1000 * formula
