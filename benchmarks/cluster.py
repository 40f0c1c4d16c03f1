"""Several hosts on one machine, joined by links of a given rate and delay.

    python benchmarks/cluster.py --hosts 2 --ranks-per-host 1 --rate 1gbit \\
        -- benchmarks/wire.py --rounds 4

Each host is a network namespace with one interface; a bridge joins them. The
script after ``--`` runs under torchrun on every host, and the bytes that each
host sent are printed at its end. Needs Linux, root, iproute2 and tc.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

SUBNET = "10.93.7"
INTERFACE = "eth0"
PORT = 29_577


@dataclass(frozen=True)
class Host:
    """One namespace; ``number`` starts at 1."""

    cluster: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.cluster}h{self.number}"

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number}"

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def sent_nbytes(self) -> int:
        lines = _run(*self.command("cat", "/proc/self/net/dev")).splitlines()
        [fields] = [line.split() for line in lines if line.strip().startswith(f"{INTERFACE}:")]
        return int(fields[9])


class Cluster:
    """Hosts that exist as long as the context; they go whatever happens inside."""

    def __init__(self, hosts: int, rate: str, delay: str) -> None:
        self.name = f"f{os.getpid()}"
        self.hosts = [Host(self.name, number) for number in range(1, hosts + 1)]
        self._shape = ["tc", "qdisc", "add", "dev", INTERFACE]
        # The bucket is what passes at full speed at once: small, or short bursts go unshaped.
        self._rate = ["root", "handle", "1:", "tbf", "rate", rate, "burst", "128kb"]
        self._rate += ["latency", "100ms"]
        self._delay = ["parent", "1:1", "netem", "delay", delay] if delay else []
        self._stack = ExitStack()

    def __enter__(self) -> "Cluster":
        with self._stack:
            self._make()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def _make(self) -> None:
        bridge = f"{self.name}b"
        _run("ip", "link", "add", bridge, "type", "bridge")
        self._stack.callback(_try, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host in self.hosts:
            _run("ip", "netns", "add", host.name)
            self._stack.callback(_try, "ip", "netns", "del", host.name)
            outside = f"{host.name}v"
            inside = ["name", INTERFACE, "netns", host.name]
            _run("ip", "link", "add", outside, "type", "veth", "peer", *inside)
            self._stack.callback(_try, "ip", "link", "del", outside)
            _run("ip", "link", "set", outside, "master", bridge, "up")
            for words in (
                ("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE),
                ("ip", "link", "set", INTERFACE, "up"),
                ("ip", "link", "set", "lo", "up"),
                (*self._shape, *self._rate),
            ):
                _run(*host.command(*words))
            if self._delay:
                _run(*host.command(*self._shape, *self._delay))

    def run(self, ranks_per_host: int, script: Sequence[str]) -> int:
        """Run ``script`` under torchrun on every host; the first exit status that is not 0."""
        environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}
        environment.setdefault("OMP_NUM_THREADS", "1")
        processes = [
            subprocess.Popen(
                host.command(
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *(f"--nnodes={len(self.hosts)}", f"--node-rank={host.number - 1}"),
                    *(f"--nproc-per-node={ranks_per_host}", f"--local-addr={host.address}"),
                    *(f"--master-addr={self.hosts[0].address}", f"--master-port={PORT}"),
                    *script,
                ),
                env=environment,
            )
            for host in self.hosts
        ]
        try:
            return max((process.wait() for process in processes), key=bool)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _try(*words: str) -> None:
    """Clean up what may be gone already."""
    subprocess.run(words, capture_output=True, check=False)


def _what_is_missing() -> str | None:
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    return None


def main() -> int:
    """Run the command line's script on the command line's cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--delay", default="", help="of each link, one way; needs netem: 0.1ms")
    parser.add_argument("script", nargs="+", help="a script and its arguments, behind --")
    options = parser.parse_args()
    if missing := _what_is_missing():
        print(f"no cluster here: {missing}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    with Cluster(options.hosts, options.rate, options.delay) as cluster:
        status = cluster.run(options.ranks_per_host, options.script)
        sent = ", ".join(f"{host.sent_nbytes() / 1e6:.1f}" for host in cluster.hosts)
    print(f"sent by each host, in all: {sent} MB")
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A request to end leaves through the contexts, as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
