"""The exceptions that users of fsdp2 can meet, beyond Python's own."""

from __future__ import annotations


class UsageError(AssertionError, ValueError):
    """A mistake in a call. PyTorch's own FSDP2 raises ``AssertionError`` for these.

    It is a ``ValueError`` too, so that code written for either catches it.
    """


class NotGatheredError(UsageError, RuntimeError):
    """A parameter was used as a full tensor where it is a shard.

    DTensor itself raises ``RuntimeError`` for this.
    """


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. All ranks raise it, with the same reason."""
