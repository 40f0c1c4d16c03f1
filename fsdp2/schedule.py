"""One training step: what is gathered, freed and reduced when.

::

    pre-forward(k)    wait for gather(k); issue gather(k+1) from the recorded order
    post-forward(k)   free k unless it is kept
    pre-backward(k)   wait for gather(k); issue gather(k-1)
    gradients(k)      the last gradient of k has been accumulated: issue reduce(k)
    passed(k)         backward has left the modules of k: free k, then sum what was lent
    end of backward   reduce what is left; wait for all; the shards have their gradients

Every decision is a function of what all ranks see alike: the order of modules, policies
and limits. The order of the last iteration predicts this one; a wrong prediction costs
time and nothing else.
"""

from __future__ import annotations

from fsdp2 import _torch
from fsdp2.adapting import Fixed, Limiter, limiter_of
from fsdp2.calls import Call, Phase, Step
from fsdp2.compiling import untraced
from fsdp2.limits import DEFAULT_LIMIT, Auto
from fsdp2.order import Order, check_same_order, enclosing
from fsdp2.param_group import GroupState, ParamGroup
from fsdp2.passes import Passes
from fsdp2.streams import Streams
from fsdp2.tracing import Listener, Trace, waiting
from fsdp2.under_way import UnderWay


class Schedule:
    """The state that all groups under one root share."""

    def __init__(self, groups: list[ParamGroup], streams: Streams) -> None:
        self.groups = groups
        self.streams = streams
        self.asked_limit: int | Auto = DEFAULT_LIMIT
        self.limit = DEFAULT_LIMIT
        self._limiter: Limiter = Fixed(DEFAULT_LIMIT)
        self.phase = Phase.IDLE
        self._phase_around = Phase.IDLE
        """What a backward interrupts: ``FORWARD`` where forward itself takes gradients."""
        self.is_last_backward = True
        self.backwards = 0
        """How many backwards have begun."""
        self.trace: Trace | None = None
        self.listener: Listener | None = None
        """The trace, or what finds the limit and passes on to the trace."""
        self.forward_order = Order()
        self.backward_order = Order()
        self._in_flight: list[ParamGroup] = []
        """Groups that are freed behind use, oldest gather first; kept ones do not count."""
        self.reductions = UnderWay(max(group.switches.max_exchanges for group in groups))
        self._passes = Passes(groups)
        self._clock = 0
        self._entered: dict[ParamGroup, int] = {}
        """Groups that backward is in, with the start of the oldest call that it has reached."""
        self._recomputed: ParamGroup | None = None
        """The last group that activation checkpointing ran again, not freed yet."""
        self._left: list[ParamGroup] = []
        """In the order in which forward left them; reversed it predicts the first backward."""
        self._is_checking_forward = True
        self._is_checking_backward = True
        self._enclosing = enclosing(groups)
        """For each group those around it: in memory as long as it is, they do not count."""
        for channel, group in enumerate(groups):
            group.channel = channel
            group.may_lend = False
            group.on_gradients_complete = self.gradients_complete

    # Set by users

    def set_limit(self, limit: int | Auto) -> None:
        if limit == self.asked_limit:
            return
        self._limiter.close()
        self.asked_limit = limit
        self._limiter = limiter_of(limit, self.groups, self.streams)
        self.limit = self._limiter.limit
        self.set_trace(self.trace)

    def set_trace(self, trace: Trace | None) -> None:
        self.trace = trace
        self.listener = self._limiter.listener(trace)

    # Gather and free

    def tick(self) -> int:
        """Number the starts and ends of calls."""
        self._clock += 1
        return self._clock

    def _note(self, event: str, group: ParamGroup, detail: str = "") -> None:
        if self.listener is not None:
            self.listener.add(event, group.name, detail)

    def start_gather(self, group: ParamGroup, reason: str = "") -> None:
        is_backward = self.phase is Phase.BACKWARD
        if group.switches.reshard_after_forward or is_backward:
            self._in_flight.append(group)
        group.step.is_fresh = self.phase is Phase.FORWARD and group.state is GroupState.SHARDED
        self._note("gather", group, reason)
        group.start_gather(self.streams, is_backward)

    def make_full(self, group: ParamGroup) -> None:
        """Return with the full parameters readable by what is computed next."""
        if group.needs_gather:
            self.start_gather(group, "on demand")
        if group.state is GroupState.ARRIVING:
            with waiting(self.listener, "wait", group.name):
                group.finish_gather(self.streams)

    def free(self, group: ParamGroup) -> None:
        if group.state is not GroupState.SHARDED:
            self._note("free", group)
            group.free()
        if group in self._in_flight:
            self._in_flight.remove(group)
        group.step.in_backward = group.step.is_fresh = False

    def _free_unless_running(self, group: ParamGroup) -> None:
        """A backward inside a forward must not take away what that forward computes with."""
        if not group.step.running:
            self.free(group)

    def _prefetch(self, group: ParamGroup, order: Order, explicit: list[ParamGroup] | None) -> None:
        """Gather what comes after ``group``."""
        if explicit is not None:
            for other in explicit:
                if other.needs_gather:
                    self.start_gather(other, "as listed")
            return
        outer = self._enclosing[group]
        counted = len(self._in_flight) - sum(map(outer.__contains__, self._in_flight))
        for other in order.upcoming():
            if counted >= self.limit:
                return
            if other.needs_gather and self._will_gather(other):
                counted += 1
                self.start_gather(other, "ahead")

    def _will_gather(self, group: ParamGroup) -> bool:
        return self.phase is not Phase.BACKWARD or group.switches.unshard_in_backward

    def _free_mispredicted(self, needed: ParamGroup) -> None:
        """What was gathered ahead and is not what comes next must not stay in memory."""
        for group in list(self._in_flight):
            if group.state is GroupState.ARRIVING and group is not needed:
                self.free(group)

    def _advance(self, order: Order, group: ParamGroup) -> None:
        if order.advance(group):
            self._free_mispredicted(group)

    # Forward

    def begin_forward(self, root_name: str) -> None:
        """The root's forward starts."""
        if self.phase is Phase.BACKWARD and _torch.in_backward():
            return  # activation checkpointing runs the root again
        if self.phase is not Phase.IDLE:
            what = "backward" if self.phase is Phase.BACKWARD else "forward"
            raise RuntimeError(
                f"{root_name}: the previous {what} did not finish because it raised; call "
                "reset_iter_state() on this module before the next forward"
            )
        self.phase = Phase.FORWARD
        self._passes.begin(is_backward=False)
        self.forward_order.begin()
        self._limiter.begin_forward(self.forward_order)
        self._left = []

    def end_forward(self, failed: bool) -> None:
        """The root's forward has returned or raised."""
        if self.phase is not Phase.FORWARD:
            return
        if not failed and self._is_checking_forward:
            check_same_order(self.groups, len(self.groups), self.phase.value)
            self._is_checking_forward = False
        self.phase = Phase.FAILED if failed else Phase.IDLE
        for group in self._in_flight[:]:
            # What was gathered ahead and nobody came for. A full group is still wanted: by
            # modules of a list that were not called yet, or by who gathered it by hand.
            if failed or group.state is GroupState.ARRIVING:
                self.free(group)
        self._passes.end(failed)

    def enter_forward(self, group: ParamGroup, explicit: list[ParamGroup] | None) -> None:
        group.step.running += 1
        if self.phase is Phase.FORWARD and group.params:
            if self._is_checking_forward:
                check_same_order(self.groups, group.channel, self.phase.value)
            self._advance(self.forward_order, group)
        if self._recomputed not in (None, group):
            self._free_recomputed()
        # A part that was kept for a backward which never came is as stale as a full group.
        is_kept = group.state is not GroupState.SHARDED and group.step.running == 1
        is_old = is_kept and not (group.step.in_backward or group.step.is_fresh)
        if is_old and not group.renew():
            self.free(group)
        self.make_full(group)
        group.step.is_fresh = False
        group.attributes.show()
        if self.phase is Phase.FORWARD:
            self._prefetch(group, self.forward_order, explicit)
        self._note("forward", group)

    def leave_forward(self, group: ParamGroup, needs_backward: bool, is_last_call: bool) -> None:
        """One of the group's modules has returned; ``is_last_call`` says that all of them have."""
        group.step.running = max(0, group.step.running - 1)
        if group.step.running:
            return  # a module that calls itself
        group.attributes.hide()
        group.step.ran |= needs_backward
        if needs_backward and not group.waiting:
            group.expect_gradients()
        if self.phase is Phase.BACKWARD or (needs_backward and _torch.in_backward()):
            # Activation checkpointing; around the root, reentrant, no backward of ours has begun.
            if not group.step.in_backward and group.switches.reshard_after_forward:
                if self._recomputed is not group:
                    self._free_recomputed()
                self._recomputed = group
            return
        if self.phase is Phase.FORWARD:
            self._left.append(group)
        if is_last_call and group.switches.reshard_after_forward:
            self._free_after_forward(group)
        elif is_last_call:
            group.take_back()

    def _free_after_forward(self, group: ParamGroup) -> None:
        if not (group.switches.keeps_part and group.step.ran and group.state is GroupState.FULL):
            return self.free(group)
        self._note("keep part", group)
        group.keep_part(self.streams)
        if group in self._in_flight:
            self._in_flight.remove(group)

    def _free_recomputed(self) -> None:
        group, self._recomputed = self._recomputed, None
        if group is not None and not group.step.in_backward:
            self.free(group)

    # Backward

    def enter_backward(
        self, group: ParamGroup, call: Call, explicit: list[ParamGroup] | None
    ) -> None:
        """The gradient of an output of one call of the group has arrived."""
        self.begin_backward()
        self._leave_newer(call.ended, group)
        self._entered[group] = min(call.started, self._entered.get(group, call.started))
        if group.step.in_backward:
            return
        if self._recomputed is not group:
            self._free_recomputed()
        self._recomputed = None
        group.step.in_backward = True
        if not group.params:
            return
        if self._is_checking_backward and group.state is not GroupState.FULL:
            check_same_order(self.groups, group.channel, self.phase.value)
        self._advance(self.backward_order, group)
        if group.switches.unshard_in_backward:
            self.make_full(group)
            self._note("backward", group)
        self.reductions.end_lent(self.listener)
        self._prefetch(group, self.backward_order, explicit)

    def begin_backward(self) -> None:
        """Autograd reached the first of our hooks, or another."""
        if self.phase is Phase.BACKWARD:
            return
        self._phase_around = self.phase
        self.phase = Phase.BACKWARD
        self._passes.begin(is_backward=True)
        self.backwards += 1
        _torch.call_at_end_of_backward(self.end_backward)
        last_pass = self.backward_order.used
        self.backward_order.begin(last_pass or self._left[::-1])
        self._limiter.begin_backward(self.backward_order)

    def passed(self, group: ParamGroup, call: Call) -> None:
        """Backward has left one call of the group's modules."""
        self._leave_newer(call.started, group)
        group.step.calls.pass_newer(call.started)
        if not group.step.calls:
            self._leave(group)

    def _leave_newer(self, stamp: int, reached: ParamGroup) -> None:
        """Backward reached what was made at ``stamp``: later calls of other groups are over.

        Groups whose inputs need no gradients have no other end before that of backward, and
        ranks that wait for this one's share of their reduction would wait for it too long.
        """
        for group, started in list(self._entered.items()):
            if group is not reached and started >= stamp:
                group.step.calls.pass_newer(stamp)
                if not group.step.calls:
                    self._leave(group)

    def _leave(self, group: ParamGroup) -> None:
        """Backward has left all calls of the group's modules."""
        self._entered.pop(group, None)
        if not group.step.is_settled:
            self._settle(group)
        if group.switches.reshard_after_backward:
            self._free_unless_running(group)
            self.reductions.end_lent(self.listener)
            self._prefetch(group, self.backward_order, None)

    def gradients_complete(self, group: ParamGroup) -> None:
        """Every trainable parameter of the group has a gradient."""
        self.begin_backward()
        group.expect_gradients()
        self._hand_in(group)

    def _hand_in(self, group: ParamGroup) -> None:
        """Reduce the gradients that the group has, or keep them for a later reduction."""
        group.step.is_settled = True
        if group.switches.reduces_gradients:
            self._note("reduce", group)
            self.reductions.start(group, self.streams, self.listener)
        else:
            group.keep_gradients()

    @untraced
    def end_backward(self) -> None:
        """Called by autograd when it has no more to do."""
        if self._is_checking_backward:
            self._settle_shared()
            check_same_order(self.groups, len(self.groups), self.phase.value)
            self._is_checking_backward = False
        for group in self.groups:
            self._settle(group)
        self._entered.clear()
        if self.is_last_backward:
            self.reductions.finish(self.listener)
        self._recomputed = None
        for group in self.groups:
            if group.switches.reshard_after_backward and group.state is not GroupState.SHARDED:
                self._free_unless_running(group)
            group.step.end_backward(self.is_last_backward)
            group.may_lend = True  # ranks have compared their orders
        self._passes.end()
        self.limit = self._limiter.end_backward()
        self.phase = self._phase_around

    def _settle_shared(self) -> None:
        """Before ranks compare where they are, give what another may be waiting for.

        A rank that enters a group which is not full compares first, so of such groups only
        those that this rank entered too can be waited for. Nothing is waited for here.
        """
        with self.reductions.unlimited():
            for group in self.groups:
                if group in self._entered or group.state is GroupState.FULL:
                    self._settle(group)

    def _settle(self, group: ParamGroup) -> None:
        """Hand in the gradients of a group whose parameters were not all used.

        Where nothing was used on this rank another rank may have used something, so the
        group takes part in the reduction all the same.
        """
        step = group.step
        if group.switches.reduces_gradients:
            is_unused = step.ran and not step.is_settled and bool(group.trainable)
            has_partial = group.switches.all_reduces and group.has_partial_sums
            is_kept_back = group.is_accumulating or (has_partial and not step.is_settled)
            is_due = self.is_last_backward and (is_unused or is_kept_back)
        else:
            # Also without a gradient: all ranks agree on whether they accumulate.
            is_due = step.ran and bool(group.trainable)
        if group.has_new_gradients or is_due:
            self._hand_in(group)
        group.waiting.clear()

    def reset(self) -> None:
        """Forget an iteration that raised, with its gradients that were not reduced yet."""
        self.reductions.drop()
        self._recomputed = None
        for group in self.groups:
            group.attributes.hide()
            self.free(group)
            group.drop_gradients()
            group.step = Step()
        self._passes.end()
        self._in_flight.clear()
        self._entered.clear()
        if self.phase is Phase.BACKWARD:
            self.limit = self._limiter.end_backward()
        self.phase = Phase.IDLE
