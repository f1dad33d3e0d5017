"""A machine's metadata server, as far as spot machines of AWS, Google Cloud and Azure ask it, with their refusals."""

from __future__ import annotations

import http.server
import threading
from typing import Any

AWS, GCP, AZURE = "/latest/", "/computeMetadata/v1/instance/", "/metadata/"


class MetadataServer(http.server.ThreadingHTTPServer):
    """One of this machine's, at a port of its own while the context lasts.

    Attributes:
        cloud: whose; paths of others are not known (404).
        notice: the body that the question for a notice gets; None for "nothing of that name".
        token: the one that AWS's has given out and takes (IMDSv2: 401 for any other, or none); another one is given
            out after ``forget_token``.
        tokens_given: how often it was asked for.
        tokens_refused: how often AWS's got another one, or none.
    """

    daemon_threads = True

    def __init__(self, cloud: str, handler: type[http.server.BaseHTTPRequestHandler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.cloud = cloud
        self.notice: str | None = None
        self.token = "token 0"
        self.tokens_given = self.tokens_refused = 0
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def forget_token(self) -> None:
        """As one that was started anew, or whose token has run out."""
        self.token = f"token {int(self.token.split()[1]) + 1}"

    def __enter__(self) -> MetadataServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    server: MetadataServer

    def do_PUT(self) -> None:
        ours = self.server.cloud == "aws" and self.path == AWS + "api/token"
        if ours and not self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
            return self._answer(400)
        self.server.tokens_given += ours
        return self._answer(200, self.server.token) if ours else self._answer(404)

    def do_GET(self) -> None:
        cloud, path, notice = self.server.cloud, self.path, self.server.notice
        known: dict[str, str | None]
        if cloud == "aws":
            if self.headers["X-aws-ec2-metadata-token"] != self.server.token:
                self.server.tokens_refused += 1
                return self._answer(401, "Unauthorized")
            known = {AWS + "meta-data/spot/instance-action": notice}
        elif cloud == "gcp":
            if self.headers["Metadata-Flavor"] != "Google":
                return self._answer(403, "Missing Metadata-Flavor:Google header.")
            known = {GCP + "id": "4520031799277581759", GCP + "preempted": notice}
        else:
            if self.headers["Metadata"] != "true":
                return self._answer(400, "Required metadata header not specified")
            name = AZURE + "instance/compute/name?api-version=2021-02-01&format=text"
            known = {name: "vm_1", AZURE + "scheduledevents?api-version=2020-07-01": notice}
        return self._answer(200, known.get(path))

    def _answer(self, code: int, body: str | None = None) -> None:
        self.send_response(404 if body is None and code == 200 else code)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""
