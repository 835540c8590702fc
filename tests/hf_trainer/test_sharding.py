"""Sharded training: the losses of plain CPU torch, one graph per step, every tensor sharded as planned."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import hf_trainer
import xla_adapters
from hf_trainer import XLAArguments
from tests.hf_trainer.scenarios import Run, arguments, assert_close, ours, reference, steps_of, train
from tests.hf_trainer.sharded_models import MODELS, ROWS, data, model
from tests.isolation import isolated
from tests.support import Stream
from tests.trainers import check_cuts, optimizer_of
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.sharding import Mesh, ShardingConfig, ShardingPlan
from xla_adapters.sharding.mesh import tiles_of
from xla_adapters.sharding.sharder import spec_of

pytestmark = pytest.mark.isolated(env={"CPU_NUM_DEVICES": "8"})

STEPS = 6
on_4_devices = functools.partial(isolated, env={"CPU_NUM_DEVICES": "4"})


def options(**more: Any) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        **more,
    }


def start() -> None:
    xla_adapters.initialize(spmd=True)


def sharded(name: str, sharding: Any, *, args: dict[str, Any] | None = None, **more: Any) -> Run:
    start()
    return ours(model(name), data(name), args=arguments(**options(**(args or {}))), sharding=sharding, **more)


def assert_cut_as_planned(run: Run) -> int:
    """Checks every parameter and every tensor of optimizer state. Returns how many parameters are split."""
    return len(check_cuts(run.trainer.sharding_plan, run.trainer.model, optimizer_of(run.trainer)))


def trains_as_on_one_cpu(name: str, sharding: Any, *, split: bool = True, steps: int = STEPS) -> Run:
    run = sharded(name, sharding, args={"max_steps": steps})
    run.assert_one_graph(steps)
    program = steps_of(run.trainer).train
    assert program.replays > 0, program.replay_reasons
    assert (assert_cut_as_planned(run) > 0) == split
    expected = reference(model(name), data(name), args=options(max_steps=steps))
    assert_close(run.losses, expected.losses, 1e-5)
    assert_close(run.logged("grad_norm"), expected.logged("grad_norm"), 1e-4)
    return run


# The others are in `test_every_model`.
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "resnet", "t5"])
def test_models(name: str) -> None:
    trains_as_on_one_cpu(name, "2d")


@pytest.mark.parametrize("scheme", ["dp", "fsdp", "tp"])
def test_schemes(scheme: str) -> None:
    trains_as_on_one_cpu("llama", scheme, split=scheme != "dp")


def test_fsdp_on_xla_of_the_training_arguments() -> None:
    start()
    config = {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True}
    args = arguments(fsdp="full_shard", fsdp_config=config, **options(max_steps=3))
    run = ours(model("llama"), data("llama"), args=args)
    assert run.trainer.sharding_config == ShardingConfig(scheme="fsdp")
    assert assert_cut_as_planned(run) > 0
    assert run.trainer.model.is_gradient_checkpointing
    assert_close(run.losses, reference(model("llama"), data("llama"), args=options(max_steps=3)).losses, 1e-5)
    # They can be given to another trainer.
    assert args.fsdp
    with pytest.raises(ConfigError, match="the training arguments ask for fsdp"):
        ours(model("llama"), data("llama"), args=args, sharding="dp")


@on_4_devices
def test_four_devices() -> None:
    run = trains_as_on_one_cpu("gpt2", "2d")
    assert run.trainer.sharding_plan.mesh == Mesh.data_and_model(2, 2)


@pytest.mark.long
@pytest.mark.parametrize(("name", "scheme"), zip(MODELS, itertools.cycle(["fsdp", "tp", "2d", "dp"]), strict=False))
def test_every_model(name: str, scheme: str) -> None:
    trains_as_on_one_cpu(name, scheme, split=scheme != "dp", steps=20)


@on_4_devices
def test_the_sum_of_losses_between_two_logs_is_no_second_graph() -> None:
    run = sharded("gpt2", "dp", args={"logging_steps": 3})
    run.assert_one_graph(STEPS)
    expected = reference(model("gpt2"), data("gpt2"), args=options(logging_steps=3))
    assert_close(run.losses, expected.losses, 1e-5)


def test_a_mesh_of_ones_own_and_overrides() -> None:
    config = ShardingConfig(
        scheme="2d",
        mesh_shape=(2, 4),
        axis_names=("model", "data"),
        overrides={"*.mlp.*": (None, None), "model.norm.weight": ("data",)},
    )
    run = trains_as_on_one_cpu("llama", config)
    plan = run.trainer.sharding_plan
    assert plan.spec_of("model.layers.1.mlp.up_proj.weight") == (None, None)
    assert plan.spec_of("model.norm.weight") == ("data",)
    assert plan.spec_of("model.layers.0.self_attn.q_proj.weight") == ("model", "data")


def test_accumulation_evaluation_and_a_partial_batch() -> None:
    samples = data("gpt2", 3 * ROWS + 8)
    args = options(gradient_accumulation_steps=2, num_train_epochs=1, max_steps=-1, eval_strategy="epoch")
    start()
    run = ours(model("gpt2"), samples, args=arguments(**args), eval_dataset=samples[: ROWS + 3], sharding="fsdp")
    expected = reference(model("gpt2"), samples, args=args, eval_dataset=samples[: ROWS + 3])
    assert_close(run.losses, expected.losses, 1e-5)
    assert_close(run.logged("eval_loss"), expected.logged("eval_loss"), 1e-5)
    assert_cut_as_planned(run)


def test_checkpoint_is_whole_costs_no_compile_and_resumes_exactly(tmp_path: Path) -> None:
    start()
    args = {"save_strategy": "steps", "save_steps": 3, "output_dir": str(tmp_path)}
    run = sharded("llama", "tp", args=args)
    # The step is the only graph: saving gathers on the host.
    assert run.counts.compiles == 1, run.explain()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    for name, value in run.parameters().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    resumed = sharded(
        "llama", "tp", args=args, train_options={"resume_from_checkpoint": str(tmp_path / "checkpoint-3")}
    )
    assert resumed.losses == run.losses
    assert_cut_as_planned(resumed)


def test_predictions_are_those_of_one_cpu() -> None:
    start()
    trainer = hf_trainer.Trainer(
        model=model("bert"), args=arguments(**options()), sharding="2d", eval_dataset=data("bert")
    )
    predicted = trainer.predict(data("bert", ROWS + 5))
    plain = model("bert").eval()
    with torch.no_grad():
        expected = torch.cat([plain(input_ids=sample["input_ids"][None]).logits for sample in data("bert", ROWS + 5)])
    torch.testing.assert_close(torch.as_tensor(predicted.predictions), expected, atol=1e-5, rtol=0)


class Fails(hf_trainer.Trainer):
    """Fails in the middle of the third step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step == 2:
            raise ValueError("the test's own")
        return loss


def test_a_failed_step_leaves_parameters_cut_and_as_before() -> None:
    start()
    trainer = Fails(model=model("gpt2"), args=arguments(**options()), train_dataset=data("gpt2"), sharding="2d")
    with pytest.raises(ValueError, match="the test's own"):
        train(trainer)
    run = Run(trainer)
    assert_cut_as_planned(run)
    shorter = reference(model("gpt2"), data("gpt2"), args=options(max_steps=STEPS, lr_scheduler_type="constant"))
    assert len(shorter.losses) == STEPS
    two = sharded("gpt2", "2d", args={"max_steps": 2, "lr_scheduler_type": "linear"})
    for name, value in two.parameters().items():
        # A schedule of two steps has other learning rates. The failed step is in neither run.
        assert (value - run.parameters()[name]).abs().max() < 3e-3, name


def test_an_error_in_a_module_leaves_it_its_parameters() -> None:
    start()
    net = model("gpt2")
    layer = net.transformer.h[0].mlp.c_fc
    forward, calls = layer.forward, 0

    def fails_once(inputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("the test's own")
        return forward(inputs)  # type: ignore[no-any-return]

    layer.forward = fails_once
    trainer = hf_trainer.Trainer(net, arguments(**options()), train_dataset=data("gpt2"), sharding="fsdp")
    with pytest.raises(ValueError, match="the test's own"):
        train(trainer)
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in layer._parameters.values())
    assert_cut_as_planned(Run(trainer))


@pytest.mark.parametrize("stops_early", [None, True])
def test_norms_and_gradient_checkpointing(stops_early: bool | None) -> None:
    args = {"gradient_checkpointing": True}
    with contextlib.nullcontext() if stops_early is None else set_checkpoint_early_stop(stops_early):
        run = sharded("gpt2", "fsdp", args=args)
    # Clipping needs the norm of all gradients.
    assert max(run.logged("grad_norm")) > 1
    assert_close(run.losses, reference(model("gpt2"), data("gpt2"), args=options()).losses, 1e-5)


def test_annotations_of_the_user_stay() -> None:
    start()
    runtime, net, mesh = xla_adapters.get_runtime(), model("gpt2"), Mesh.data_and_model(4, 2)
    net.to("xla")
    net.tie_weights()
    weight = net.transformer.h[0].mlp.c_fc.weight
    runtime.spmd.shard(weight, tiles_of(mesh, ("data", None)))
    run = ours(net, data("gpt2"), args=arguments(**options()), sharding="2d")
    entry = next(
        item for item in run.trainer.sharding_plan.parameters if item.name == "transformer.h.0.mlp.c_fc.weight"
    )
    assert (entry.spec, entry.decided_by) == (("data", None), "user")
    assert_cut_as_planned(run)
    assert_close(run.losses, reference(model("gpt2"), data("gpt2"), args=options()).losses, 1e-5)


@pytest.mark.parametrize(
    "flag",
    [
        pytest.param({"auto_sharding": True}, marks=pytest.mark.slow),
        {"sharding": {"auto_sharding": {"keep_user_sharding": True, "measure_top_k": 0}}},
    ],
)
def test_automatic(flag: dict[str, Any]) -> None:
    start()
    run = ours(model("llama"), data("llama"), args=arguments(**options()), **flag)
    run.assert_one_graph(STEPS)
    plan = run.trainer.sharding_plan
    assert plan.predicted is not None
    assert plan.predicted.step_seconds > 0
    assert (plan.measured is not None) == ("auto_sharding" in flag)
    assert_cut_as_planned(run)
    assert_close(run.losses, reference(model("llama"), data("llama"), args=options()).losses, 1e-5)


def test_automatic_within_a_budget_that_only_fits_split_state() -> None:
    start()
    state = 16 * sum(parameter.numel() for parameter in model("llama").parameters())
    config = ShardingConfig(memory_budget=int(0.5 * state), measure_top_k=0)
    run = ours(model("llama"), data("llama"), args=arguments(**options()), sharding=config)
    plan = run.trainer.sharding_plan
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes <= config.memory_budget
    assert assert_cut_as_planned(run) > 0
    assert_close(run.losses, reference(model("llama"), data("llama"), args=options()).losses, 1e-5)


def test_a_plan_that_was_made_before_is_used(tmp_path: Path) -> None:
    start()
    run = ours(model("llama"), data("llama"), args=arguments(**options()), sharding="2d")
    path = tmp_path / "plan.json"
    run.trainer.sharding_plan.save(path)
    plan = ShardingPlan.load(path)
    again = ours(model("llama"), data("llama"), args=arguments(**options()), sharding=plan)
    assert again.trainer.sharding_plan == plan
    assert_cut_as_planned(again)
    assert_close(again.losses, run.losses, 1e-6)
    with pytest.raises(ConfigError, match="'2d' was made for another model: parameters or their shapes differ"):
        ours(model("gpt2"), data("gpt2"), args=arguments(**options()), sharding=plan)


def test_a_stream_of_data_is_planned_by_a_recipe_and_says_so() -> None:
    start()
    with pytest.warns(UserWarning, match="no batch to plan for"):
        run = ours(model("gpt2"), Stream(data("gpt2")), args=arguments(**options(max_steps=3)), auto_sharding=True)
    assert run.trainer.sharding_plan.name == "fsdp"
    config = ShardingConfig(memory_budget=1000)
    with (
        pytest.raises(ConfigError, match=r"memory_budget=1000 .* state alone take \d+ bytes on each of 8"),
        pytest.warns(UserWarning, match="not for activations"),
    ):
        ours(model("gpt2"), Stream(data("gpt2")), args=arguments(**options(max_steps=3)), sharding=config)


class LoadsInTheMiddle(transformers.TrainerCallback):
    """Restores the initial weights after three steps: of one block, then of the model."""

    def __init__(self, name: str) -> None:
        self._weights = model(name).state_dict()
        self._block = model(name).transformer.h[0].state_dict()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            kwargs["model"].transformer.h[0].load_state_dict(self._block)
        if state.global_step == 3:
            kwargs["model"].load_state_dict(self._weights)


def test_weights_that_are_loaded_in_the_middle_are_cut() -> None:
    run = sharded("gpt2", "fsdp", callbacks=[LoadsInTheMiddle("gpt2")])
    run.assert_one_graph(STEPS)
    assert assert_cut_as_planned(run) > 0
    expected = reference(model("gpt2"), data("gpt2"), args=options(), callbacks=[LoadsInTheMiddle("gpt2")])
    assert_close(run.losses, expected.losses, 1e-5)


def test_weights_that_are_loaded_between_two_runs_are_cut() -> None:
    run = sharded("gpt2", "fsdp", args={"max_steps": 2})
    run.trainer.model.load_state_dict(model("gpt2").state_dict())
    train(run.trainer)
    assert_cut_as_planned(run)


def test_a_model_made_by_the_trainer_is_held_to_the_plan() -> None:
    class Hooks(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            blocks = kwargs["model"].model.layers
            found.append([len(block._forward_hooks) for block in blocks])

    start()
    found: list[list[int]] = []
    net = model("llama")
    run = ours(
        None,
        data("llama"),
        args=arguments(**options()),
        sharding="2d",
        # Seeding in it would change the order of the data.
        model_init=lambda: copy.deepcopy(net),
        callbacks=[Hooks()],
    )
    run.assert_one_graph(STEPS)
    assert found == [[1, 1]] * STEPS
    assert not any(block._forward_hooks for block in run.trainer.model.model.layers)
    assert_cut_as_planned(run)
    assert_close(run.losses, reference(net, data("llama"), args=options()).losses, 1e-5)


def test_annotations_that_do_not_fit_the_default_mesh_choose_it() -> None:
    start()
    runtime, net, mesh = xla_adapters.get_runtime(), model("llama"), Mesh.data_and_model(2, 4)
    net.to("xla")
    layer = net.model.layers[0]
    runtime.spmd.shard(layer.mlp.up_proj.weight, tiles_of(mesh, ("model", None)))
    runtime.spmd.shard(layer.mlp.down_proj.weight, tiles_of(mesh, (None, "data")))
    run = ours(net, data("llama"), args=arguments(**options()), auto_sharding={"measure_top_k": 0})
    plan = run.trainer.sharding_plan
    assert plan.mesh == mesh
    assert plan.spec_of("model.layers.0.mlp.up_proj.weight") == ("model", None)
    assert plan.spec_of("model.layers.0.mlp.down_proj.weight") == (None, "data")
    assert_cut_as_planned(run)
    assert_close(run.losses, reference(model("llama"), data("llama"), args=options()).losses, 1e-5)


def test_annotations_of_the_user_can_be_given_up() -> None:
    start()
    runtime, net = xla_adapters.get_runtime(), model("llama")
    net.to("xla")
    runtime.spmd.shard(net.lm_head.weight, tiles_of(Mesh.data_and_model(1, 8), (None, "model")))
    config = ShardingConfig(scheme="fsdp", keep_user_sharding=False)
    run = ours(net, data("llama"), args=arguments(**options()), sharding=config)
    assert run.trainer.sharding_plan.spec_of("lm_head.weight") == ("data", None)
    assert_cut_as_planned(run)
    assert_close(run.losses, reference(model("llama"), data("llama"), args=options()).losses, 1e-5)


# ---- what cannot work ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"sharding": "zero3"}, "valid values: 'auto', 'dp', 'fsdp', 'tp', '2d'"),
        ({"sharding": "dp", "auto_sharding": True}, "not both"),
        ({"sharding": ShardingConfig(mesh_shape=(3, 2))}, "for 6 devices, and there are 8"),
        ({"sharding": {"mesh": (2, 4)}}, "unknown sharding option"),
        ({"xla_args": XLAArguments(sharding="dp"), "sharding": "dp"}, "asked for twice"),
    ],
)
def test_options_that_contradict(wanted: dict[str, Any], message: str) -> None:
    start()
    with pytest.raises(ConfigError, match=message):
        hf_trainer.Trainer(model=model("gpt2"), args=arguments(**options()), **wanted)


@pytest.mark.slow
def test_what_the_model_or_the_batch_does_not_divide() -> None:
    start()
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size=12: .* use 16 or 8"):
        sharded("gpt2", "dp", args={"per_device_train_batch_size": 12})
    wrong = ShardingConfig(scheme="dp", overrides={"*.wpe.weight": (("data", "model"), "data")})
    with pytest.raises(ConfigError, match="uses an axis twice"):
        sharded("gpt2", wrong)
    nobody = ShardingConfig(scheme="dp", overrides={"nobody.*": (None,)})
    with pytest.raises(ConfigError, match="fit no parameter"):
        sharded("gpt2", nobody)
    with pytest.raises(ConfigError, match="too little: the smallest"):
        sharded("gpt2", ShardingConfig(memory_budget=1000))


def test_modes_that_cannot_shard() -> None:
    start()
    with pytest.raises(UnsupportedOptionError, match="dynamo"):
        sharded("gpt2", "dp", xla_mode="eager+dynamo")
    with pytest.raises(RuntimeOrderError, match="without sharding"):
        ours(nn.Linear(2, 2), data("gpt2"))


def test_sharding_after_the_runtime_started_without_it() -> None:
    args = arguments(**options())
    with pytest.raises(RuntimeOrderError, match=r"initialize\(spmd=True\)"):
        hf_trainer.Trainer(model=model("gpt2"), args=args, sharding="dp")


def test_a_plan_of_a_mesh_is_found_back_from_tiles() -> None:
    mesh = Mesh.data_and_model(4, 2)
    for spec in (("data", None), (None, "model"), ("model", "data"), (("data", "model"), None), (None, None)):
        assert spec_of(mesh, tiles_of(mesh, spec)) == spec


@on_4_devices
def test_several_devices_without_sharding() -> None:
    """torch_xla would wait for three processes that nobody has started."""
    with pytest.raises(ConfigError, match=r"has 4 devices.*auto_sharding=True.*CPU_NUM_DEVICES=1"):
        ours(model("gpt2"), data("gpt2"), args=arguments(**options()))
