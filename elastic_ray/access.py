"""SHELL: checks that a Ray cluster is reachable and admits this process, before Ray itself connects.

Ray may retry for a minute, print pages of C++ output or end the process. A single gRPC request gets an answer at once.
Ray reads its token from RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token, if RAY_AUTH_MODE=token.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import ray
from ray._private import worker as _ray_worker
from ray.exceptions import AuthenticationError

from placement.storage.private_files import has_neighbours, open_to_others

HOW_TO_START = "start one with `ray start --head`, or set RAY_ADDRESS to the HOST:PORT of one that runs"
_REACH_S = 5.0
_ANSWER_S = 3.0
_MODE = "RAY_AUTH_MODE"
_SOURCES = "RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token"
_HEAD = "`ray get-auth-token` on the cluster's head prints it"
HOW_TO_SEND = f"set {_MODE}=token, and put the token in {_SOURCES}; {_HEAD}"


class AccessRefusedError(ConnectionError):
    """Error raised if the Ray cluster refuses this process because its token is missing, wrong, or not expected."""


def join() -> None:
    """Call ``ray.init()`` unless this process has already joined a cluster.

    Raises:
        ConnectionError: The cluster to join does not answer.
        AccessRefusedError: The cluster does not admit this process.
    """
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "")
        there = find_address(address)
        check_answers(there, address)
        check_access(there, mode_is_open=_MODE not in os.environ and address in ("", "auto"))
        ray.init()


def session_warning() -> str:
    """Return a warning if other accounts on this machine can write to Ray's session folders; otherwise empty.

    Ray creates these folders world-writable. Workers import code from them, and Ray's token does not protect them.
    """
    node: Any = _ray_worker._global_node
    if node is None:
        return ""
    folder = str(node.get_session_dir_path())
    try:
        if not (open_to_others(folder) and has_neighbours()):
            return ""
    except OSError:  # it is another machine's
        return ""
    return (
        f"other accounts of this machine may write into {folder}, from which Ray's workers import code: start Ray with "
        "a --temp-dir that only its user can come to, and drivers with RAY_ADDRESS=auto: "
        "install -d -m 700 ~/ray && ray start --temp-dir ~/ray/tmp ..."
    )


def find_address(address: str) -> str:
    """Return the HOST:PORT of the local cluster for ``auto`` or an empty address; return other addresses unchanged.

    An empty address resolves as in ``ray.init()``: to the cluster that ``ray start`` recorded on this machine, even if
    that cluster is no longer running. If none is recorded, return "", which makes Ray start a new cluster.
    """
    if address not in ("", "auto"):
        return address
    try:
        from ray._private.services import canonicalize_bootstrap_address  # private: `ray` itself finds clusters by it

        return canonicalize_bootstrap_address(address or None) or address  # type: ignore[arg-type]
    except Exception:
        return address


def check_answers(there: str, address: str) -> None:
    """Raise ConnectionError if no cluster listens at the resolved address; Ray itself would retry for minutes.

    Args:
        there: The resolved address, as returned by :func:`find_address`.
        address: The original address, for the error message: RAY_ADDRESS, or ``auto``; empty if not set.
    """
    if address.startswith(("http://", "https://")):
        raise ConnectionError(
            f"RAY_ADDRESS={address} is a dashboard's address, which serves only submit, logs and stop of submissions; "
            "set RAY_ADDRESS to the cluster's HOST:PORT (6379 by default) for the other commands"
        )
    place = split(there.rpartition("://")[2].partition("/")[0])
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        named = "RAY_ADDRESS" if address not in ("", "auto") else "the file that `ray start` has left on this machine"
        raise ConnectionError(
            f"no Ray cluster answers at {there}, which {named} names ({error}); {HOW_TO_START}, or to local for one of "
            "this process's own"
        ) from error


def split(address: str) -> tuple[str, int] | None:
    """Return the host and port of a cluster's control store, parsed from HOST:PORT.

    Return None for any other kind of address (``auto``, ``ray://...``).
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def check_access(address: str, *, mode_is_open: bool = False) -> None:
    """Raise AccessRefusedError if a cluster does not admit this process.

    A cluster that does not answer passes the check, because Ray reports that itself.

    Args:
        address: HOST:PORT. Other kinds of address are not checked.
        mode_is_open: True if RAY_AUTH_MODE is not set and the cluster was found on this machine. Ray then sends a token
            if it has one, and joins without a token if the cluster requires none.

    Raises AccessRefusedError if the token is missing or wrong, or if the cluster uses none. The message says how to fix
    it.
    """
    token = _token(mode_is_open)
    if split(address) is None:
        return
    refused = _refuses(address, token)
    if refused is None:
        return
    if refused:
        raise AccessRefusedError(_refused(address, token))
    if not token or _refuses(address, "") is not False:
        return
    if mode_is_open:
        os.environ[_MODE] = "disabled"  # what Ray reads next: with a token it would refuse its own workers' answers
        return
    raise AccessRefusedError(
        f"the Ray cluster at {address} was started without a token, but this process has {_MODE}=token, and would "
        f"refuse the answers of the cluster's workers: set {_MODE}=disabled here, or start the cluster with a token"
    )


def _token(mode_is_open: bool) -> str:
    """Return the token that Ray would send from this process, as an HTTP header value; empty if it would send none."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    wanted = is_token_auth_enabled()
    if not wanted and not mode_is_open:
        return ""
    loader = AuthenticationTokenLoader.instance()
    try:
        if loader.has_token(ignore_auth_mode=True):
            return f"Bearer {loader.get_raw_token(ignore_auth_mode=True)}"
    except AuthenticationError as error:
        raise AccessRefusedError(f"{_first(error)}; the token is to be in {_SOURCES}; {_HEAD}") from None
    if wanted:
        raise AccessRefusedError(f"{_MODE}=token, but there is no token: put it in {_SOURCES}; {_HEAD}")
    return ""


def _refuses(address: str, token: str) -> bool | None:
    """True if a cluster refuses a process that sends this token; None if the cluster does not answer."""
    try:
        import grpc
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    except ImportError:  # a small installation of Ray
        return None
    request: Any = gcs_service_pb2.GetClusterIdRequest()  # type: ignore[attr-defined]
    stub: Any = gcs_service_pb2_grpc.NodeInfoGcsServiceStub
    metadata = (("authorization", token),) if token else ()
    with contextlib.suppress(OSError), _channel(address) as channel:
        try:
            stub(channel).GetClusterId(request, timeout=_ANSWER_S, metadata=metadata)
            return False
        except grpc.RpcError as error:
            return True if error.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return None


def _channel(address: str) -> Any:
    """Open a channel to the control store without Ray's interceptors, which would send this process's token."""
    import grpc

    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address)
    from ray._common.tls_utils import load_certs_from_env

    chain, key, root = load_certs_from_env()  # type: ignore[no-untyped-call]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, chain))


def _refused(address: str, token: str) -> str:
    """Return a message that says why the cluster refuses this process, and how to fix it."""
    if token:
        return (
            f"the Ray cluster at {address} refuses the token of this process, which is another cluster's or has "
            f"changed: put the right one in {_SOURCES}; {_HEAD}"
        )
    mode = os.environ.get(_MODE)
    now = f"{_MODE} is not set" if mode is None else f"{_MODE}={mode}"
    return f"the Ray cluster at {address} wants a token, and this process sends none ({now}): {HOW_TO_SEND}"


def _first(error: BaseException) -> str:
    """Return the first line of an error's message, without the advice that Ray appends."""
    return str(getattr(error, "message", "") or error).strip().splitlines()[0].rstrip(".")
