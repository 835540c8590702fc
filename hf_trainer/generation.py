"""Generation: transformers' loop on the host, one compiled graph per token on the device."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import EncoderDecoderModel, GenerationMixin, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache, StaticCache, StaticLayer
from transformers.utils.generic import ModelOutput

from hf_trainer.patches import as_if_compiling
from hf_trainer.replay import model_code
from hf_trainer.shapes import Prompts, TrainerShapes
from xla_adapters import StepProgram, get_runtime
from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.loop.replay import StepCode, batch_of, copies, key_of
from xla_adapters.loop.steps import StepDriver
from xla_adapters.replay.call_spec import CallSpec, batch_reason
from xla_adapters.runtime import eager
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.sharding import whole_parameters
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.utils.nested_values import tensors_in
from xla_adapters.utils.patching import replaced

# The name of the step that calls the model to generate.
GENERATION = "generate"
# Options with which transformers guesses tokens, and takes back what the model would not have chosen.
_GUESSING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
# The argument and the result of a model that is its cache.
_CACHE = "past_key_values"
# The attribute of a replaced `forward` with what was there.
_FOUND = "_xla_adapters_found"
# After so many traced calls of a graph, values are compared by a transfer of their own.
_DEADLINE = 4
# Of so many models, the latest ones, the code is known.
_MODELS = 4
# All that a model may use of the classes of a static cache. User code may replace it.
_MEMBERS: dict[Any, frozenset[str]] = {
    kind: frozenset(name for name in dir(kind) if not name.startswith("__"))
    for kind in (EncoderDecoderCache, StaticCache, StaticLayer)
}


class Generation:
    """The graphs of one trainer's generation, and the user's code in them.

    Args:
        steps: of the trainer.
    """

    def __init__(self, steps: StepDriver) -> None:
        self.program = steps.evaluation[GENERATION]
        self._steps = steps
        self._codes: dict[int, tuple[torch.nn.Module, StepCode]] = {}
        # The modules whose methods are replaced at present, which need not be compared.
        self._replaced: Counter[int] = Counter()

    def spec(self, model: torch.nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> CallSpec | None:
        """Describes a call of the model for a replay; None if it can only be traced.

        A call with a static cache that holds tokens changes nothing but the cache's tensors. The first call makes them.

        Args:
            model: is called.
            args: its positional arguments.
            inputs: its other arguments, on the device.
        """
        if not self._steps.may_replay:
            return None
        cache = inputs.get(_CACHE)
        state = _static_state(cache)
        if state is None:
            if cache is not None and _is_filled(cache):
                self.program.refuse_replay(f"its {type(cache).__name__} keeps Python numbers, or grows")
            return None
        others = {name: value for name, value in inputs.items() if name != _CACHE}
        if id(model) not in self._codes:
            # They keep the models alive.
            for other in [*self._codes][: max(0, len(self._codes) - _MODELS + 1)]:
                del self._codes[other]
            self._codes[id(model)] = model, model_code(model, self._steps.config)
        code = self._codes[id(model)][1].present()
        tensors, key = batch_of((args, others))
        kinds = tuple((tensor.shape, tensor.dtype) for tensor in state)
        return CallSpec(
            # The code keeps the model alive, whose `id` is no other one's then.
            key=(*key, *map(type, others.values()), kinds, *_members_of(cache), *key_of(code), id(model)),
            batch=tensors,
            extras=state,
            modules=[model, *code.modules],
            deadline=_DEADLINE,
            reason=code.reason or batch_reason((args, others)),
            change=code.change,
            constants=code.tensors,
            look_again=code.look_again,
            exempt=lambda module: ("forward", "generate") if self._replaced[id(module)] else (),
        )

    @contextmanager
    def replacing(self, model: torch.nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
        """Inside the context the model has another `forward` or `generate`, on the instance."""
        self._replaced[id(model)] += 1
        try:
            with replaced(model, name, method):
                yield
        finally:
            self._replaced -= Counter([id(model)])

    def note_cache(self, cache: Any, *, is_new: bool) -> None:
        """Behind a call: notes that nothing shares a buffer with the tensors of a cache that the call has made.

        Otherwise the first replay looks for what does, among all objects of the process.
        """
        state = _static_state(cache) if is_new else None
        if state and get_runtime().has_shared_buffers:
            get_runtime().shared_buffers.note_own_buffers(state)


class TrainerSteps(StepDriver):
    """The steps of a trainer of transformers.

    Attributes:
        generation: those of its generation.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.generation = Generation(self)


@contextmanager
def compiled_forward(
    model: torch.nn.Module,
    generation: Generation,
    results: Callable[[Any], Any] = lambda results: results,
    *,
    of_prompts: str = "",
    shapes: TrainerShapes | None = None,
) -> Iterator[None]:
    """Inside the context each call of the model is one compiled graph, executed once.

    Inputs on the host are uploaded. A call inside an open step becomes part of that step.

    Args:
        model: its `forward` is replaced on the instance, and put back at the exit.
        generation: runs, replays and explains the graphs.
        results: called with the results when the graph was executed; returns what the call returns.
        of_prompts: what distinguishes the graphs from those for prompts of other lengths, in words.
        shapes: gives inputs few shapes.
    """
    own = vars(model).get("forward")
    # Of a context around this one, or the model's own.
    own, forward = getattr(own, _FOUND, (own, model.forward))
    program = generation.program

    @functools.wraps(forward)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if program.is_open:
            return forward(*args, **kwargs)
        length, cut = of_prompts, None
        if shapes is not None and not args:
            kwargs, length, cut = shapes.of_evaluation(kwargs, preprocesses=False)
        with uploading():
            args, kwargs = _upload(args), _upload(kwargs)
        phase, filling = _phase(model, kwargs, length)
        # A replay compares the model with what it was, which has no method of this function.
        with _as_found(model, own), Discarding(program), torch.no_grad(), as_if_compiling():
            spec = generation.spec(model, args, kwargs)
            program.open(inputs=_tensors_only(kwargs), phase=phase, facts={"cache": filling}, replay=spec)
            computed, returns_cache = program.outputs(_without_cache, forward, *args, **kwargs)
            program.close()
        cache = kwargs.get(_CACHE)
        generation.note_cache(cache, is_new=spec is None)
        if returns_cache:
            computed = type(computed)(**{**computed, _CACHE: cache})
        returned = results(computed)
        if cut is not None and isinstance(returned, ModelOutput):
            returned.loss, returned.logits, _ = cut((returned.get("loss"), returned.get("logits"), None))
        return returned

    setattr(compiled, _FOUND, (own, forward))
    with generation.replacing(model, "forward", compiled):
        yield


@contextmanager
def _as_found(model: torch.nn.Module, own: Any) -> Iterator[None]:
    """Inside the context a model whose `forward` is replaced has its own: of the instance, or of the class (None)."""
    attributes = vars(model)
    compiled = attributes.pop("forward", None)
    if own is not None:
        attributes["forward"] = own
    try:
        yield
    finally:
        if compiled is not None:
            attributes["forward"] = compiled


def generate(model: Any, *args: Any, generation: Generation, shapes: TrainerShapes | None = None, **kwargs: Any) -> Any:
    """`model.generate`, every strategy of it, with the model on an XLA device.

    Token bookkeeping (growing sequences, beams, stopping) stays on the host, where it costs no compile. The model
    runs with a static key-value cache, so that each token is the same graph. Each token costs one execution and two
    transfers: the logits and the length of the cache. Beams reorder the cache on the device and cost a few more.
    A model that cannot use a static cache (Bert, Blip) has a graph for each length of the text.

    A model with a `generate` of its own (Whisper, Blip) may compute before that loop. Each part of the model that it
    calls is a graph then, with its results on the host.

    Args:
        model: a transformers model on the device.
        args: as for `model.generate`; tensors may be on the host or the device.
        generation: runs, replays and explains the graphs.
        shapes: gives prompts few lengths.
        kwargs: as for `model.generate`.

    Returns:
        As `model.generate`, on the host; without the cache, unless the caller chose its class.

    Raises:
        UnsupportedOptionError: tokens are to be guessed by an assistant or looked up in the prompt.
    """
    _refuse_guesses(model, args, kwargs)
    args, kwargs = to_host_in_one_transfer((args, kwargs))
    prompts = None if shapes is None else _prompts(model, args, kwargs, shapes)
    if prompts is not None:
        args, kwargs = (), prompts.options
    length = "" if prompts is None else prompts.phase
    returns_cache = prompts is None or not prompts.are_longer
    with ExitStack() as stack:
        # In the config, because a model's own `generate` may hand its arguments on to something else.
        config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
        # A model of PEFT has its part generate, which then chooses.
        if isinstance(model, GenerationMixin) and _wants_static_cache(model, kwargs):
            returns_cache = False
            stack.enter_context(replaced(config, "cache_implementation", "static"))
            # One cache for prompts of all lengths: the graph of further tokens is the same for them.
            if prompts is not None and prompts.cache_length and getattr(config, "max_cache_len", 0) is None:
                stack.enter_context(replaced(config, "max_cache_len", prompts.cache_length))
        if config is not None:
            # On some devices transformers would compile the call of the model by `torch.compile`.
            stack.enter_context(replaced(config, "disable_compile", True))
        stack.enter_context(_on_the_host(model))
        if type(model).generate is not GenerationMixin.generate:
            stack.enter_context(_on_host_outside_of_steps(generation.program))
            for part in _parts(model):
                stack.enter_context(compiled_forward(part, generation, to_host_in_one_transfer))
                if isinstance(part, GenerationMixin):
                    stack.enter_context(generation.replacing(part, "generate", _of(part, generation, shapes)))
        stack.enter_context(compiled_forward(model, generation, _loss_and_logits_on_host, of_prompts=length))
        if model.config.is_encoder_decoder:
            stack.enter_context(compiled_forward(model.get_encoder(), generation, of_prompts=length))
        generated = model.generate(*args, **kwargs)
    generated = to_host_in_one_transfer(generated)
    if isinstance(generated, ModelOutput) and not returns_cache:
        # It has no place for more tokens, or other positions than the sequences.
        generated = type(generated)(**{name: value for name, value in generated.items() if name != "past_key_values"})
    return generated if prompts is None else prompts.cut(generated)


@contextmanager
def _on_the_host(model: torch.nn.Module) -> Iterator[None]:
    """Around transformers' loop, whose inputs are on the host on purpose."""
    # Outside the model's own graph nothing is executed operation by operation.
    with eager(False), torch.no_grad(), whole_parameters(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"You are calling \.generate\(\) with the `input_ids`")
        yield


def _refuse_guesses(model: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    named = {**inspect.signature(model.generate).bind_partial(*args, **options).arguments, **options}
    configs = (named.get("generation_config"), getattr(model, "generation_config", None))
    for name in _GUESSING:
        if any(value not in (None, False) for value in (named.get(name), *(getattr(c, name, None) for c in configs))):
            raise UnsupportedOptionError(
                f"generate({name}=...): tokens that were guessed wrong are cut off a cache that grows, which would "
                "compile a graph for each length. Leave it out"
            )


@contextmanager
def compiled_generation(
    owner: Any, model: torch.nn.Module, generation: Generation, shapes: TrainerShapes | None = None
) -> Iterator[None]:
    """Inside the context `owner.generate` is the function `generate` above, and calls of the model are compiled.

    Args:
        owner: the model whose `generate` is replaced on the instance, and put back at the exit.
        model: the same, or a wrapper of it, that is called without generating.
        generation: runs, replays and explains the graphs.
        shapes: gives prompts and other inputs few shapes.
    """
    with (
        generation.replacing(owner, "generate", _of(owner, generation, shapes)),
        compiled_forward(model, generation, _loss_and_logits_on_host, shapes=shapes),
    ):
        yield


def _prompts(model: Any, args: tuple[Any, ...], options: Mapping[str, Any], shapes: TrainerShapes) -> Prompts | None:
    """The arguments of a model's `generate`, by name; None if its prompts are no tokens."""
    if type(model).generate is not GenerationMixin.generate:
        if isinstance(model, GenerationMixin):
            shapes.prompts_stay(f"{type(model).__name__} has a generate of its own")
        # Otherwise it is a model of PEFT, whose part generates.
        return None
    named = inspect.signature(model.generate).bind_partial(*args, **options).arguments
    named |= named.pop("kwargs", {})
    if model.main_input_name != "input_ids" and named.get("input_ids") is None:
        return None
    if (ids := named.pop("inputs", None)) is not None:
        named["input_ids"] = ids
    return shapes.of_prompts(model, named)


def _of(model: Any, generation: Generation, shapes: TrainerShapes | None) -> Callable[..., Any]:
    """The function `generate` above in place of the model's own."""
    own = model.generate

    def compiled(*args: Any, **kwargs: Any) -> Any:
        with replaced(model, "generate", own):
            return generate(model, *args, generation=generation, shapes=shapes, **kwargs)

    return compiled


def _wants_static_cache(model: Any, options: Mapping[str, Any]) -> bool:
    """Whether to generate with a static cache: nothing else is asked for, and the model can use one."""
    config = options.get("generation_config") or getattr(model, "generation_config", None)
    if config is None or options.get("use_cache", config.use_cache) is False:
        return False
    if options.get("cache_implementation") or config.cache_implementation or options.get("past_key_values") is not None:
        return False
    # The model of PEFT, while its part generates.
    outer = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", model)
    if getattr(getattr(outer, "active_peft_config", None), "is_prompt_learning", False):
        # PEFT asks for the positions in a static cache in a way that transformers has left.
        return False
    # The others read the length of the cache in Python. An encoder-decoder pair of two models says so of its decoder.
    decoder = getattr(model, "decoder", None) if isinstance(model, EncoderDecoderModel) else model
    return bool(getattr(decoder, "_can_compile_fullgraph", False))


@contextmanager
def _on_host_outside_of_steps(program: StepProgram) -> Iterator[None]:
    """Inside the context, models say outside of steps that they are on the host.

    A `generate` of a model's own makes tensors on the model's device, and combines them with tensors on the host.
    """
    device: Any = PreTrainedModel.device

    def where(model: PreTrainedModel) -> torch.device:
        return device.fget(model) if program.is_open else torch.device("cpu")

    with replaced(PreTrainedModel, "device", property(where)):
        yield


def _parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The submodules that code of the model may call outside of the model's `forward`."""
    return [part for part in model.modules() if part is not model]


def _upload(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(get_runtime().device.torch_device())
    if type(value) is dict:
        return {key: _upload(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_upload(item) for item in value)
    return value


def _phase(model: torch.nn.Module, inputs: Mapping[str, Any], length: str) -> tuple[str, str]:
    """A name for this call of the model, and the state of its cache. Each pair has a graph of its own."""
    cache = inputs.get("past_key_values")
    name = type(model).__name__
    if cache is None:
        return f"{name} without cache{length}", "none"
    # The cache of an encoder-decoder has two parts. The self-attention part is the one that fills up.
    if hasattr(cache, "self_attention_cache"):
        name += length
        cache = cache.self_attention_cache
    if _is_filled(cache):
        filled = cache.get_seq_length() if hasattr(cache, "get_seq_length") else None
        # A cache that grows has another shape for each token.
        return f"{name}, next tokens" + (f" after {filled}" if isinstance(filled, int) else ""), "filled"
    return f"{name}, first tokens{length}", "empty"


def _is_filled(cache: Any) -> bool:
    """Whether a cache holds tokens; one of an encoder and a decoder, in its self-attention part."""
    return bool(getattr(getattr(cache, "self_attention_cache", cache), "is_initialized", True))


def _static_state(cache: Any) -> list[torch.Tensor] | None:
    """The tensors of a cache that holds tokens, all of which a call of the model writes in place; None for another one.

    The layers of other static caches keep Python numbers.
    """
    parts = [cache]
    if type(cache) is EncoderDecoderCache:
        if not all(cache.is_updated.values()) or _hides_a_member(cache):
            return None
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    state: list[Any] = []
    for part in parts:
        if type(part) is not StaticCache or part.offloading or _hides_a_member(part):
            return None
        for layer in part.layers:
            if type(layer) is not StaticLayer or not layer.is_initialized or _hides_a_member(layer):
                return None
            state += (layer.keys, layer.values, layer.cumulative_length)
    return state


def _hides_a_member(part: Any) -> bool:
    """Whether a cache or a layer has, on the instance, what its class has."""
    return not _MEMBERS[type(part)].isdisjoint(vars(part))


def _members_of(cache: Any) -> Iterator[Any]:
    """All that a model may use of the classes of a static cache, as it is now."""
    for kind in dict.fromkeys((type(cache), StaticCache, StaticLayer)):
        yield from (getattr(kind, name, None) for name in _MEMBERS[kind])


def _without_cache(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The results of a call, but for the cache that it was given (it is no value); and whether that was among them."""
    computed = forward(*args, **kwargs)
    if not isinstance(computed, ModelOutput):
        return computed, False
    cache = kwargs.get(_CACHE)
    returns_cache = cache is not None and computed.get(_CACHE) is cache
    if returns_cache:
        computed = type(computed)(**{name: value for name, value in computed.items() if name != _CACHE})
    return copies(computed, of_others_than=tensors_in((args, kwargs))), returns_cache


def _tensors_only(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def _loss_and_logits_on_host(results: Any) -> Any:
    if isinstance(results, ModelOutput):
        on_device = {name: results[name] for name in ("loss", "logits") if results.get(name) is not None}
        for name, value in to_host_in_one_transfer(on_device).items():
            results[name] = value
        return results
    return to_host_in_one_transfer(results)
