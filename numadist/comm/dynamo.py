"""Keep Dynamo out of the process group: torch calls it from C++ while a frame hook is active (DDP, FSDP2)."""

import inspect

import torch


def hide_from_dynamo(*classes: type) -> None:
    """Have torch's frame hook run the methods of these classes, and all they call, as they are.

    Marks their code instead of using `torch._dynamo.disable`: that would import Dynamo, seconds of start-up, in
    programs that never compile.
    """
    hook = torch._C._dynamo.eval_frame
    as_it_is = hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.SKIP)
    for cls in classes:
        for method in vars(cls).values():
            if isinstance(method, property):
                method = method.fget
            if inspect.isfunction(method):
                hook.set_code_exec_strategy(method.__code__, as_it_is)
