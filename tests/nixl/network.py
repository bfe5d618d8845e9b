"""Network namespaces of two ranks and the cable between them, which can be cut and healed.

Every function works on the namespace of the process that calls it.
"""

from __future__ import annotations

import ctypes
import os

from pyroute2 import IPRoute

_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_CABLE = "kvpush0"
_OTHER_END = "kvpush1"
# An address that nobody has: frames sent there are lost without a word.
_NOBODY = "02:00:00:00:00:99"


def isolate() -> None:
    """Put this thread, and those it starts, into a network namespace of its own.

    With a /sys of its own: UCX looks there for interfaces, and an older one shows older ones.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    done = (
        libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, _MS_REC_PRIVATE, None) == 0
        and libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None) == 0
    )
    if not done:
        raise PermissionError(f"no network namespace: {os.strerror(ctypes.get_errno())}")


def lay_cable(other_pid: int) -> None:
    """Make a cable from this namespace to that of another process."""
    with IPRoute() as net:
        net.link("add", ifname=_CABLE, kind="veth", peer={"ifname": _OTHER_END})
        (far,) = net.link_lookup(ifname=_OTHER_END)
        net.link("set", index=far, ifname=_CABLE, net_ns_pid=other_pid)


def plug_in(address: str) -> None:
    """Give this end of the cable its address."""
    with IPRoute() as net:
        for name in ("lo", _CABLE):
            (index,) = net.link_lookup(ifname=name)
            if name == _CABLE:
                net.addr("add", index=index, address=address, prefixlen=24)
            net.link("set", index=index, state="up")


def cut(other: str) -> None:
    """What is sent to the other end from now on is lost."""
    with IPRoute() as net:
        (index,) = net.link_lookup(ifname=_CABLE)
        net.neigh("replace", dst=other, lladdr=_NOBODY, ifindex=index, state="permanent")


def heal(other: str) -> None:
    """The cable works again."""
    with IPRoute() as net:
        (index,) = net.link_lookup(ifname=_CABLE)
        net.neigh("delete", dst=other, lladdr=_NOBODY, ifindex=index, state="permanent")
