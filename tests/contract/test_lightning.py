"""What the Lightning strategies use of Lightning and torchmetrics without a promise that it stays."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torchmetrics
import torchmetrics.metric
from lightning.fabric import fabric, wrappers
from lightning.fabric.connector import _Connector, _convert_precision_to_unified_args
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.utilities import apply_func, cloud_io, seed, throughput
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import throughput_monitor
from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call, setup
from lightning.pytorch.trainer.call import _call_and_handle_interrupt, _interrupt
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torchmetrics.aggregation import BaseAggregator

from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_connectors_have_the_flags_as_arguments() -> None:
    for constructor in (_AcceleratorConnector.__init__, _Connector.__init__):
        assert {"accelerator", "devices", "num_nodes", "precision"} <= set(parameters(constructor))
    assert "_precision_plugin_flag" in inspect.getsource(_AcceleratorConnector._check_and_init_precision)
    assert "_precision_instance" in inspect.getsource(_Connector._check_and_init_precision)


def test_the_connector_asks_a_strategy_for_what_it_brings() -> None:
    source = inspect.getsource(_AcceleratorConnector._check_config_and_set_final_flags)
    assert "if self._strategy_flag._accelerator:" in source
    assert "if self._strategy_flag._precision_plugin:" in source


def test_the_connectors_choose_an_accelerator_by_one_function() -> None:
    for connector in (_AcceleratorConnector, _Connector):
        assert parameters(connector._choose_auto_accelerator) == []
        source = inspect.getsource(connector.__init__)
        assert "self._accelerator_flag = self._choose_auto_accelerator()" in source
        assert "self._strategy_flag" in source


def test_precision_flags_have_one_name() -> None:
    assert _convert_precision_to_unified_args(32) == "32-true"
    assert _convert_precision_to_unified_args("bf16") == "bf16-mixed"


def test_a_batch_begins_and_ends_where_steps_do() -> None:
    """The step opens in the strategy's hook, behind all others, and closes before any callback looks."""
    source = inspect.getsource(_FitLoop(Trainer.__new__(Trainer)).epoch_loop.advance)
    hook = source.index('_call_strategy_hook(trainer, "on_train_batch_start"')
    compute = source.index("self.automatic_optimization.run(")
    end = source.index('_call_callback_hooks(trainer, "on_train_batch_end"')
    assert source.index('_call_lightning_module_hook(trainer, "on_train_batch_start"') < hook < compute < end
    assert end < source.index("update_train_step_metrics()")
    assert parameters(_FitLoop._should_accumulate) == ["self"]
    assert isinstance(_FitLoop.total_batch_idx, property)


def test_the_global_step_is_counted_in_two_places() -> None:
    loop = _FitLoop(Trainer.__new__(Trainer)).epoch_loop
    assert loop.automatic_optimization.optim_progress.optimizer.step.total.completed == 0
    assert loop.manual_optimization.optim_step_progress.total.completed == 0
    source = inspect.getsource(type(loop).global_step.fget)
    assert "self.automatic_optimization.optim_progress.optimizer_steps" in source
    assert "self.manual_optimization.optim_step_progress.total.completed" in source
    steps = inspect.getsource(type(loop.automatic_optimization.optim_progress).optimizer_steps.fget)
    assert "self.optimizer.step.total.completed" in steps


def test_callbacks_hear_of_an_exception_before_anybody_else() -> None:
    source = inspect.getsource(_interrupt)
    assert source.index('_call_callback_hooks(trainer, "on_exception"') < source.index("strategy.on_exception")
    assert inspect.getsource(_call_and_handle_interrupt).count("trainer._teardown()") == 3


def test_hooks_of_callbacks_are_called_through_one_function() -> None:
    assert parameters(call._call_callback_hooks) == ["trainer", "hook_name", "args", "monitoring_callbacks", "kwargs"]
    folder = Path(inspect.getfile(Trainer)).parents[1]
    assert not [path for path in folder.rglob("*.py") if "import _call_callback_hooks" in path.read_text()]


def test_a_call_of_the_trainer_has_one_frame_that_names_it() -> None:
    assert "trainer" in parameters(_call_and_handle_interrupt)
    for method in (Trainer.fit, Trainer.validate, Trainer.test, Trainer.predict):
        assert "call._call_and_handle_interrupt(" in inspect.getsource(method)


def test_the_throughput_monitors_ask_one_function() -> None:
    assert parameters(throughput.get_available_flops) == ["device", "dtype"]
    assert throughput_monitor.get_available_flops is throughput.get_available_flops
    assert "get_available_flops(fabric.device, dtype)" in inspect.getsource(throughput.ThroughputMonitor)


def test_each_accelerator_for_xla_counts_as_tpus() -> None:
    assert "isinstance(trainer.accelerator, XLAAccelerator)" in inspect.getsource(setup._log_device_info)


def test_wrappers_of_checkpoint_plugins_begin_empty() -> None:
    wrapper = AsyncCheckpointIO()
    assert isinstance(wrapper, _WrappingCheckpointIO)
    assert wrapper.checkpoint_io is None


def test_replaced_names_of_the_logger_connector() -> None:
    assert parameters(result.convert_tensors_to_scalars) == ["data"]
    assert logger_connector.convert_tensors_to_scalars is result.convert_tensors_to_scalars
    assert isinstance(logger_connector._LoggerConnector.progress_bar_metrics, property)
    source = inspect.getsource(logger_connector._LoggerConnector.__init__)
    for name in ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics"):
        assert f"self.{name}" in source
    assert parameters(result._ResultCollection._get_cache) == ["result_metric", "on_step"]
    assert parameters(result._ResultMetric.to) == ["self", "args", "kwargs"]
    assert parameters(result._ResultMetric.update) == ["self", "value", "batch_size"]
    assert "self.value = self.meta.reduce_fx(self.value, value)" in inspect.getsource(result._ResultMetric.update)


def test_what_is_logged_becomes_a_tensor_in_one_function() -> None:
    """`LightningModule._LightningModule__to_tensor`."""
    module: Any = LightningModule
    convert = module._LightningModule__to_tensor
    assert list(inspect.signature(convert).parameters) == ["self", "value", "name"]
    assert "self.__to_tensor, name" in inspect.getsource(LightningModule.log)


def test_replaced_names_of_torchmetrics() -> None:
    assert parameters(BaseAggregator._cast_and_nan_check_input) == ["self", "x", "weight"]
    assert parameters(torchmetrics.MetricCollection._equal_metric_states) == ["metric1", "metric2"]
    assert parameters(torchmetrics.Metric.reset) == ["self"]
    metric = torchmetrics.SumMetric()
    assert set(metric._defaults) == {"sum_value"}


def test_hooks_of_strategies() -> None:
    assert parameters(Strategy.optimizer_step) == ["self", "optimizer", "closure", "model", "kwargs"]
    assert parameters(Strategy.on_train_batch_start) == ["self", "batch", "batch_idx"]
    assert parameters(Strategy.batch_to_device) == ["self", "batch", "device", "dataloader_idx"]
    assert parameters(Strategy.save_checkpoint) == ["self", "checkpoint", "filepath", "storage_options"]
    # Lightning 2.5 has no `weights_only`.
    loads = ["self", "checkpoint_path", "weights_only"]
    assert parameters(Strategy.load_checkpoint) in (loads, loads[:-1])


def test_fabric_asks_a_strategy_for_what_it_brings() -> None:
    source = inspect.getsource(_Connector._check_config_and_set_final_flags)
    for name in ("_accelerator", "_precision", "_checkpoint_io"):
        assert f"if self._strategy_flag.{name}:" in source
    assert source.index("self._precision_instance = plugin") < source.index("if self._strategy_flag._precision:")
    assert "self.accelerator" in inspect.getsource(_Connector._lazy_init_strategy)


def test_fabric_moves_batches_and_seeds_where_they_are_replaced() -> None:
    move = apply_func.move_data_to_device
    assert wrappers.move_data_to_device is fabric.move_data_to_device is move
    assert parameters(move) == ["batch", "device"]
    assert "move_data_to_device(item, self._device)" in inspect.getsource(wrappers._FabricDataLoader.__iter__)
    assert "torch.manual_seed(seed)" in inspect.getsource(seed.seed_everything)


def test_fabric_strategies_write_what_they_converted() -> None:
    convert = FabricStrategy._convert_stateful_objects_in_state
    assert parameters(convert) == ["self", "state", "filter"]
    assert parameters(FabricStrategy.save_checkpoint) == ["self", "path", "state", "storage_options", "filter"]
    loads = ["self", "path", "state", "strict", "weights_only"]
    assert parameters(FabricStrategy.load_checkpoint) in (loads, loads[:-1])


def test_how_lightning_reads_a_file() -> None:
    assert parameters(cloud_io._load) == ["path_or_url", "map_location", "weights_only"]
    reads = inspect.getsource(TorchCheckpointIO.load_checkpoint)
    assert "if not fs.exists(path):" in reads
    assert "return pl_load(path, map_location=map_location" in reads


def test_fabric_lets_a_loss_go_backward_by_itself_unless_the_strategy_overrides_it() -> None:
    source = inspect.getsource(wrappers._FabricModule._register_backward_hook)
    assert 'is_overridden("backward", self._strategy, parent=Strategy)' in source
    assert XLAEagerFabricStrategy.backward is FabricStrategy.backward


def test_what_the_run_report_is_told_by() -> None:
    """`fit_report` replaces these functions to time input and hooks, and to add to what is logged."""
    assert parameters(call._call_lightning_module_hook)[:2] == ["trainer", "hook_name"]
    assert parameters(logger_connector._LoggerConnector.log_metrics) == ["self", "metrics", "step"]
    for name in ("_on_before_fetch", "_on_after_fetch"):
        assert parameters(getattr(_TrainingEpochLoop, name)) == ["self"]
    begins = inspect.getsource(_TrainingEpochLoop.on_run_start)
    assert "data_fetcher._start_profiler = self._on_before_fetch" in begins
    assert "data_fetcher._stop_profiler = self._on_after_fetch" in begins
    logs = inspect.getsource(logger_connector._LoggerConnector.update_train_step_metrics)
    assert 'self.log_metrics(self.metrics["log"])' in logs
    runs = inspect.getsource(_TrainingEpochLoop.advance)
    assert 'call._call_lightning_module_hook(trainer, "on_train_batch_end", batch_output, batch, batch_idx)' in runs
    assert 'call._call_callback_hooks(trainer, "on_train_batch_end", batch_output, batch, batch_idx)' in runs


def test_where_a_loop_takes_its_backward_from() -> None:
    """`steps.backward` replaces this method; the strategy overrides no `backward`."""
    assert parameters(_AutomaticOptimization._make_backward_fn) == ["self", "optimizer"]
    assert "self._make_backward_fn(optimizer)" in inspect.getsource(_AutomaticOptimization._make_closure)
    assert 'call._call_strategy_hook(self.trainer, "backward", loss, optimizer)' in inspect.getsource(
        _AutomaticOptimization._make_backward_fn
    )
    assert XLAEagerStrategy.backward is Strategy.backward


def test_a_wrapper_of_checkpoint_plugins_passes_on_what_it_is_given() -> None:
    inner, writer = AsyncCheckpointIO(), TorchCheckpointIO()
    outer = AsyncCheckpointIO(inner)
    outer.checkpoint_io = writer
    assert outer.checkpoint_io is inner
    assert inner.checkpoint_io is writer


def test_what_is_replaced_for_ranks() -> None:
    """The sampler's arguments, how signals are looked for and noted, and how a metric gathers its state."""
    assert isinstance(vars(Trainer)["distributed_sampler_kwargs"], property)
    loop = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in loop
    assert "self.trainer.world_size > 1" in loop
    notified = inspect.getsource(_SignalConnector._sigterm_notifier_fn)
    assert "self.received_sigterm = True" in notified
    assert "_sigterm_notifier_fn" in inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "dist_sync_fn = gather_all_tensors" in inspect.getsource(torchmetrics.metric.Metric.sync)
    assert list(inspect.signature(Strategy.reduce_boolean_decision).parameters) == ["self", "decision", "all"]


def test_where_callbacks_keep_averages_of_weights() -> None:
    averaging = [callbacks.StochasticWeightAveraging(0.1)]
    if hasattr(callbacks, "WeightAveraging"):
        # Lightning 2.5 does not have it.
        averaging.append(callbacks.WeightAveraging())
    for callback in averaging:
        assert callback._average_model is None
        assert "self._average_model = " in inspect.getsource(type(callback).setup)
