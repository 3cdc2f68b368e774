"""What torch.export would get silently wrong, refused by name before or while it traces, and its own errors in the user's words."""

import contextlib
import inspect
import os
import random
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_file
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import checkpoint as checkpoint_file

from partitioner.errors import CaptureError

_HERE = os.path.dirname(os.path.realpath(__file__)) + os.sep
_OURS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.__file__) + os.sep + "contextlib",
    os.path.dirname(os.__file__) + os.sep + "functools",
    os.path.dirname(os.__file__) + os.sep + "random",
    "<",
)
# Classes by which torch itself keeps an op's own backward; export leaves such an op whole.
_KEPT_FUNCTIONS = ("torch._library", "torch._functorch", "torch._higher_order_ops", "torch._ops")
_INHERITED = object()


def _is_user(filename: str) -> bool:
    return not filename.startswith(_OURS) and not os.path.realpath(filename).startswith(_HERE)


def user_line(frame: FrameType | None) -> str:
    """`file.py:12 in forward` of the innermost frame that is the user's."""
    while frame is not None:
        if _is_user(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "somewhere in forward"


def check_model(model: nn.Module, has_targets: bool) -> None:
    """Refuse what can be seen without running: backward hooks, lazy or exotic parameters, SyncBatchNorm, a parameter called targets."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is a {type(model).__qualname__}, not a torch.nn.Module.")
    if module_file._global_backward_hooks or module_file._global_backward_pre_hooks:
        raise CaptureError("a global module backward hook is registered; a captured graph would drop it. Remove it while planning and training.")
    for path, module in model.named_modules():
        name = f"{type(module).__qualname__} {path!r}" if path else f"the model ({type(module).__qualname__})"
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{name} has a backward hook (register_full_backward_hook or a pre-hook). Hooks run outside the graph and would be dropped. "
                "Remove it; to change gradients, multiply in forward or change .grad after train_step."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{name} is TorchScript, whose inside cannot be traced. Give the Python module it was made from.")
        if isinstance(module, nn.SyncBatchNorm):
            raise CaptureError(
                f"{name} is a SyncBatchNorm, which communicates inside forward. Use the plain BatchNorm: its statistics are the whole batch's anyway."
            )
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    _check_tensor(kind, f"{path}.{key}" if path else key, tensor)
    if has_targets and "targets" in inspect.signature(model.forward).parameters:
        raise CaptureError(
            f"forward of {type(model).__qualname__} has a parameter called targets, but targets= is what train_step hands to the loss. "
            "Rename the parameter, or let the model compute its loss and give no example_targets."
        )


def _check_tensor(kind: str, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise CaptureError(f"{kind} {name} has no shape yet (a lazy module). Run the model once on an example before planning.")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise CaptureError(f"{kind} {name} is not a plain dense tensor ({tensor.layout}, {tensor.dtype}); only these can be placed.")
    if type(tensor).__module__ == "torch.distributed.tensor":
        raise CaptureError(f"{kind} {name} is a DTensor already. Give the plain model, before fully_shard or parallelize_module.")
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise CaptureError(
            f"{kind} {name} has a gradient hook (register_hook or register_post_accumulate_grad_hook), which a captured graph would drop. "
            "Remove it and change .grad after train_step instead."
        )


def _refuse_function(setup_context: Any) -> bool:
    """Stands in for torch's own check of every autograd.Function that is applied, however its `apply` was reached."""
    frame = sys._getframe(1)
    cls, args = frame.f_locals.get("cls"), frame.f_locals.get("args", ())
    kept = cls is not None and cls.__module__.startswith(_KEPT_FUNCTIONS)
    if not kept and torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        line = user_line(frame)
        if cls is checkpoint_file.CheckpointFunction:
            raise CaptureError(
                f"{line}: torch.utils.checkpoint with use_reentrant=True hides its inside from capture. Pass use_reentrant=False, "
                "or leave checkpointing to the planner (constraints={'checkpoint': 'full'})."
            )
        raise CaptureError(
            f"{line}: {getattr(cls, '__qualname__', 'an autograd.Function')} is a custom autograd.Function; capture sees its forward only, so that "
            "its backward would be lost. Write the forward so that autograd gives the gradient you want (x + (f(x) - x).detach() passes gradients "
            "straight through), or make it an operator with torch.library.custom_op and register_autograd."
        )
    return setup_context is not torch.autograd.function._SingleLevelFunction.setup_context


def _refusal(what: str, instead: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CaptureError(f"{user_line(sys._getframe(1))}: {what} in forward; a captured graph would drop it. {instead}")

    return refuse


def _plain_checkpoint(*_: Any, **__: Any) -> Generator[None, None, None]:
    """Stands in for the bookkeeping around a non-reentrant checkpoint: what is saved is the planner's to decide."""
    yield


class _NoGrad:
    """Stands in for inference_mode, of which a trace keeps nothing; without gradients is what it means for what follows."""

    @staticmethod
    def enter(self: Any) -> None:
        self._stand_in = torch.no_grad() if self.mode else contextlib.nullcontext()
        self._stand_in.__enter__()

    @staticmethod
    def leave(self: Any, *error: Any) -> None:
        self._stand_in.__exit__(*error)


def _data(self: Tensor) -> Tensor:
    """Tensor.data escapes the trace; as a detached alias it is traced."""
    return self.detach()


def _random_(original: Callable[..., Any]) -> Callable[..., Any]:
    """random_(from, to) has an argument whose name no traced graph can hold; the same draw by randint can be."""

    def random_(self: Tensor, *args: int, **kwargs: Any) -> Any:
        if not args and "to" not in kwargs:
            return original(self, *args, **kwargs)
        low, high = (kwargs.get("from", 0), kwargs["to"]) if not args else (0, args[0]) if len(args) == 1 else args
        drawn = torch.randint(low, high, self.shape, generator=kwargs.get("generator"), device=self.device)
        return self.copy_(drawn)

    return random_


def _batch_norm_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """BatchNorm with momentum=None averages over all batches; eager reads the count from the device, the graph computes with it."""

    def forward(self: Any, x: Tensor) -> Any:
        tracks = self.training and self.track_running_stats and self.num_batches_tracked is not None
        if self.momentum is not None or not tracks:
            return original(self, x)
        self._check_input_dim(x)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = nn.functional.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            factor = 1.0 / self.num_batches_tracked.double()  # as exact as the number with which eager computes
            self.running_mean.copy_(self.running_mean * (1 - factor) + mean * factor)
            self.running_var.copy_(self.running_var * (1 - factor) + var * factor)
        return out

    return forward


@contextlib.contextmanager
def tripwires() -> Iterator[None]:
    """While tracing: refuse what would be lost, and let pass in a form that is traced rightly what can be."""
    move = "Change .grad after train_step instead."
    tensor_hook = _refusal("Tensor.register_hook is called", move)
    formula = "Write the derivative as a formula of forward's tensors."
    backward, gradient = _refusal(".backward() is called", formula), _refusal("torch.autograd.grad is called", formula)
    inference = torch.autograd.grad_mode.inference_mode
    norm = torch.nn.modules.batchnorm._BatchNorm
    patches: list[tuple[Any, str, Any]] = [
        (torch.autograd.function, "_is_setup_context_defined", _refuse_function),
        (torch.Tensor, "register_hook", tensor_hook),
        (torch.Tensor, "register_post_accumulate_grad_hook", tensor_hook),
        (torch.Tensor, "backward", backward),
        (torch.Tensor, "random_", _random_(torch.Tensor.random_)),
        (torch.Tensor, "data", property(_data, inspect.getattr_static(torch.Tensor, "data").__set__)),
        (torch.autograd, "backward", backward),
        (torch.autograd, "grad", gradient),
        (inference, "__enter__", _NoGrad.enter),
        (inference, "__exit__", _NoGrad.leave),
        (checkpoint_file, "_checkpoint_without_reentrant_generator", _plain_checkpoint),
        (norm, "forward", _batch_norm_forward(norm.forward)),
    ]
    saved = [(owner, name, owner.__dict__.get(name, _INHERITED)) for owner, name, _ in patches]
    try:
        for owner, name, patch in patches:
            setattr(owner, name, patch)
        yield
    finally:
        for owner, name, original in saved:
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextlib.contextmanager
def _watched_numpy(lines: list[str]) -> Iterator[None]:
    """Note the line that calls a function of numpy.random; a profiler does not see these, they are no Python and no plain C functions."""
    module = getattr(sys.modules.get("numpy"), "random", None)
    functions = {n: f for n, f in vars(module).items() if type(getattr(f, "__self__", None)).__name__ == "RandomState"} if module else {}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            lines.append(user_line(sys._getframe(1)))
            return function(*args, **kwargs)

        return call

    try:
        for name, function in functions.items():
            setattr(module, name, watched(function))
        yield
    finally:
        for name, function in functions.items():
            setattr(module, name, function)


class PythonRandomness:
    """Notices draws from Python's and numpy's global generators, puts their state back, and finds the line that drew."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = self._numpy_state()

    @staticmethod
    def _numpy_state() -> Any:
        numpy = sys.modules.get("numpy")
        return numpy.random.get_state() if numpy is not None else None

    @staticmethod
    def _equal(a: Any, b: Any) -> bool:
        return (a is None) == (b is None) and (a is None or (a[2:] == b[2:] and bool((a[1] == b[1]).all())))

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def refuse(self, rehearse: Callable[[], object]) -> None:
        """Raise CaptureError if forward drew; `rehearse` runs it once more to see where."""
        drew = ["random"] if random.getstate() != self._python else []
        drew += [] if self._equal(self._numpy, self._numpy_state()) else ["numpy.random"]
        self.restore()
        if not drew:
            return
        lines: list[str] = []
        def profile(frame: FrameType, event: str, arg: Any) -> None:
            if event != "c_call" or lines:
                return
            if getattr(arg, "__self__", None) is random._inst:
                lines.append(user_line(frame))

        previous = sys.getprofile()
        with _watched_numpy(lines):
            sys.setprofile(profile)
            try:
                rehearse()
            finally:
                sys.setprofile(previous)
                self.restore()
        where = f"{lines[0]}: " if lines else ""
        raise CaptureError(
            f"{where}forward draws from {' and '.join(drew)}; capture would bake in one draw, the same at every step. "
            "Draw with torch (torch.rand, dropout) and choose with torch.where, or pass the number as an input."
        )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def explain(error: BaseException, model: nn.Module) -> CaptureError:
    """The CaptureError that says in the user's words what went wrong while tracing."""
    for one in _chain(error):
        if isinstance(one, CaptureError):
            return one
    names = {id(module): path for path, module in model.named_modules()}
    line, module = "", ""
    for one in reversed(list(_chain(error))):
        for frame, number in traceback.walk_tb(one.__traceback__):
            if _is_user(frame.f_code.co_filename):
                line = f"{os.path.basename(frame.f_code.co_filename)}:{number} in {frame.f_code.co_name}"
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                module = f"{type(owner).__qualname__}" + (f" ({names[id(owner)]})" if names[id(owner)] else "")
    place = ", ".join(part for part in (line, module and f"module {module}") if part) or "while tracing the model"
    first = str(error).strip().split("\n")[0]
    kinds = {type(one).__name__ for one in _chain(error)}
    needs_data = {"GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException"}
    if kinds & needs_data or "data-dependent" in str(error).lower():
        return CaptureError(
            f"{place}: Python needs a value that is known only when the data is (an if on a tensor, .item(), a size that depends on values): "
            f"{first}. One graph must serve every batch: choose with torch.where or a mask instead of if, keep numbers as tensors, and sizes fixed."
        )
    return CaptureError(f"{place}: the model cannot be captured: {type(error).__name__}: {first}")
