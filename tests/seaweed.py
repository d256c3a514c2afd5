"""A real S3 server for tests, behind a counting proxy."""

from __future__ import annotations

from pathlib import Path

from adapters.settings import StoreSettings
from adapters.store.local_s3 import LocalS3
from tests.counting_proxy import CountingProxy


class Seaweed:
    """SeaweedFS on loopback with the proxy in front: `settings(prefix)` goes through the proxy, so that `proxy.count` sees
    every call and faults can be injected; `direct(prefix)` goes around it."""

    def __init__(self, folder: Path) -> None:
        self.server = LocalS3(folder, bucket="tests")
        self.proxy = CountingProxy(self.server.ports.s3)

    def start(self) -> None:
        self.server.start()
        self.proxy.start()

    def stop(self) -> None:
        self.proxy.stop()
        self.server.stop()

    def restart(self) -> None:
        """Stops the server and starts it again on the same ports and data; the proxy stays."""
        self.server.restart()

    def settings(self, prefix: str, **others: object) -> StoreSettings:
        return self.server.settings(prefix, endpoint=self.proxy.endpoint, **others)

    def direct(self, prefix: str, **others: object) -> StoreSettings:
        return self.server.settings(prefix, **others)
