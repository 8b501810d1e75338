"""The one table of colours: each use of time has the same hue in every figure, light and dark.

Chosen by search: any two parts of a step stay apart (distance 0.07 or more in Oklab) for normal sight, protanopia,
deuteranopia and tritanopia; tests/report/test_palette.py checks it. Not for layout colours: those are in
dashboards/style.css.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hue:
    """How one thing that takes time is called and coloured."""

    label: str
    light: str
    dark: str
    pattern: str = ""  # plotly's marker.pattern.shape: tells the part without colour, on paper too
    meaning: str = ""


HUES = {
    "compute": Hue(
        label="compute", light="#3465be", dark="#5a91ee", meaning="forward and backward work, nothing else taken out"
    ),
    "exposed_transfer": Hue(
        label="exposed transfer",
        light="#e7a72e",
        dark="#e8aa31",
        meaning="blocked while data of a collective moves, all ranks having arrived",
    ),
    "exposed_wait": Hue(
        label="exposed wait",
        light="#c82e16",
        dark="#f46250",
        pattern="/",
        meaning="blocked in a collective until the last rank arrives",
    ),
    "bubble": Hue(
        label="pipeline bubble",
        light="#b581ec",
        dark="#9c5aac",
        pattern="x",
        meaning="a pipeline stage has no microbatch to work on",
    ),
    "data": Hue(label="data wait", light="#5ba593", dark="#73cda9", meaning="waiting for the next batch"),
    "checkpoint": Hue(label="checkpoint", light="#4c2f0e", dark="#7c571a", meaning="writing a checkpoint"),
    "optimizer": Hue(label="optimizer", light="#7dbbf0", dark="#bce5fd", meaning="the optimizer's own work"),
    "host": Hue(label="other host", light="#6b7077", dark="#969ca4", meaning="host work outside every known phase"),
    "idle": Hue(
        label="idle", light="#dcdee0", dark="#3c3d40", pattern=".", meaning="neither host nor device does anything"
    ),
    "forward": Hue(label="forward", light="#3465be", dark="#5a91ee", meaning="forward pass"),
    "backward": Hue(
        label="backward", light="#1d3a78", dark="#2f57a8", meaning="backward pass, with the communication inside it"
    ),
    "recompute": Hue(
        label="recompute", light="#8476cf", dark="#8f5ae8", meaning="activations computed again for the backward pass"
    ),
    "evaluation": Hue(
        label="evaluation", light="#c5e16b", dark="#cce06d", meaning="forward pass in eval mode or without gradients"
    ),
    "compile": Hue(label="compile", light="#b04589", dark="#ce5fad", meaning="torch.compile compiles"),
    "garbage_collection": Hue(
        label="garbage collection", light="#d9613a", dark="#ea7c51", meaning="Python's garbage collector runs"
    ),
    "host_bound": Hue(
        label="host-bound", light="#6b7077", dark="#969ca4", meaning="the device has nothing to do: the host is behind"
    ),
    "other": Hue(label="other", light="#b9bdc4", dark="#5d636c", meaning="outside every known phase"),
    "overlapped": Hue(
        label="overlapped communication", light="#f6e2ba", dark="#6f5523", meaning="in flight while the rank works"
    ),
    "exposed": Hue(
        label="exposed communication", light="#e7a72e", dark="#e8aa31", meaning="the rank is blocked by the operation"
    ),
    "loss": Hue(label="loss", light="#2f9c7a", dark="#5cc7a4", meaning="the loss of the last stage"),
    "weight_gradient": Hue(
        label="weight gradient",
        light="#7dbbf0",
        dark="#bce5fd",
        meaning="gradient of the weights, which nobody waits for",
    ),
    "schedule": Hue(
        label="schedule", light="#b581ec", dark="#9c5aac", meaning="what the planned order costs with equal times"
    ),
    "imbalance": Hue(
        label="imbalance", light="#3465be", dark="#5a91ee", meaning="stages take different times for a microbatch"
    ),
    "exposed_p2p": Hue(
        label="exposed messages", light="#e7a72e", dark="#e8aa31", meaning="activations and gradients on their way"
    ),
    "jitter": Hue(
        label="jitter",
        light="#5ba593",
        dark="#73cda9",
        meaning="the same action takes different times from one to the next",
    ),
    "warm_up": Hue(label="warm-up", light="#d8c3f3", dark="#6d4a86", meaning="before the first gradient of a rank"),
    "steady": Hue(label="steady", light="#9a63d6", dark="#a873c9", meaning="between warm-up and drain"),
    "drain": Hue(label="drain", light="#5d3391", dark="#d3b0ec", meaning="after the last forward of a rank"),
    "other_causes": Hue(label="other causes", light="#b9bdc4", dark="#5d636c", meaning="imbalance, messages, jitter"),
    "memory parameters": Hue(label="parameters", light="#1d3a78", dark="#5a91ee", meaning="the weights of the model"),
    "memory gradients": Hue(label="gradients", light="#7dbbf0", dark="#bce5fd", meaning="gradients of the weights"),
    "memory optimizer_state": Hue(
        label="optimizer state",
        light="#5ba593",
        dark="#73cda9",
        meaning="what the optimizer keeps, such as moments of Adam",
    ),
    "memory activations": Hue(
        label="activations", light="#e7a72e", dark="#e8aa31", meaning="kept from the forward pass for the backward pass"
    ),
    "memory communication": Hue(
        label="communication", light="#b04589", dark="#ce5fad", meaning="buffers of collectives and messages"
    ),
    "memory other": Hue(
        label="other", light="#b9bdc4", dark="#5d636c", meaning="what of the peak is left: Python, libraries, allocator"
    ),
    "memory formula": Hue(label="by formula", light="#7040e8", dark="#a040b8", meaning="what the formula says"),
    "memory sample 0": Hue(label="", light="#704010", dark="#888840"),
    "memory sample 1": Hue(label="", light="#888810", dark="#d0a0e8"),
    "memory sample 2": Hue(label="", light="#7010b8", dark="#e8d070"),
    "series 0": Hue(label="", light="#3465be", dark="#5a91ee"),
    "series 1": Hue(label="", light="#b5651d", dark="#e8aa31"),
    "series 2": Hue(label="", light="#2f7f6c", dark="#73cda9"),
    "series 3": Hue(label="", light="#a8489a", dark="#c46fd6"),
    "series 4": Hue(label="", light="#6b7077", dark="#969ca4"),
    "series 5": Hue(label="", light="#8476cf", dark="#9f8ff0"),
    "point to point": Hue(label="point to point", light="#a8489a", dark="#c46fd6", meaning="send or receive"),
}
"""By the name of a part (results.PARTS), of a phase (results.PHASES) or of a kind of interval of the timeline.

In the order in which the timeline draws them, so that what is exposed lies on top of what is overlapped.
"""

UNKNOWN = Hue(label="", light="#b9bdc4", dark="#5d636c")


def hue_of(name: str) -> Hue:
    """Return the hue of a part, phase or kind; grey for one that is not in the table."""
    return HUES.get(name, UNKNOWN)
