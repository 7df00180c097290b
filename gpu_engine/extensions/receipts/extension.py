"""The extension for receipts: the key that signs them, and what they say of the server.

Invariant: the model's files are read in the background after the start, on one thread. A request that asks for a
receipt waits for that; other requests do not.

Not responsible for: the claims (writer.py), which requests may ask (front/validation.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import NotSupported
from gpu_engine.api.ports import EngineCore, GrammarLibrary, Model
from gpu_engine.api.request import Request
from gpu_engine.api.signed_statements import MissingExtra, Signer
from gpu_engine.doors.found import Door
from gpu_engine.extensions.found import Extension
from gpu_engine.extensions.receipts.identity import KEPT, FilesChanged, ModelFiles, tokenizer_digest
from gpu_engine.extensions.receipts.writer import ReceiptWriter, ServerClaims
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.later_services import Services
from gpu_engine.front.port.listening import ServerError
from gpu_engine.model.embedded import cache_dir
from gpu_engine.ops.installation import DISTRIBUTION, installed_version
from service_runtime.own_thread import in_own_thread

log = logging.getLogger(__name__)

SETTING = "receipt_key"


def is_wanted(engine: EngineConfig, server: ServerConfig) -> bool:
    """See `ExtensionModule`."""
    return bool(server.receipt_key)


def settings(engine: EngineConfig, server: ServerConfig) -> ServerConfig:
    """See `ExtensionModule`: receipts change no setting."""
    return server


class SignedReceipts(Extension):
    """The receipts of one server."""

    _model: Model
    _files: ModelFiles

    def __init__(self, engine: EngineConfig, server: ServerConfig, doors: Sequence[Door]) -> None:
        """Raises ServerError for a key that is missing or wrong, and where the extra is not installed."""
        try:
            self._signer = Signer.of_file(Path(server.receipt_key))
        except (MissingExtra, ValueError) as error:
            raise ServerError(f"receipt_key: {error}") from error
        self.public_key = json.dumps(self._signer.jwk, sort_keys=True)
        """See `Receipts`."""
        self._config = engine
        self._calls: Calls | None = None
        self._claims: ServerClaims | None = None
        self._identifying: asyncio.Task[ServerClaims] | None = None
        self.receipts = self

    def attach(self, engine: EngineCore, model: Model, registry: CollectorRegistry) -> None:
        """Note the model's files as they are now, right after the model was loaded. Raises ServerError."""
        self._model = model
        try:
            self._files = ModelFiles.of(model.path)
        except OSError as error:
            raise ServerError(f"receipt_key: the model's files cannot be read: {error}") from error

    def add_to(self, services: Services, calls: Calls) -> list[str]:
        """Take the calls, which know the grammar process. Adds no service."""
        self._calls = calls
        return []

    async def warm(self) -> None:
        """Begin to compute the digests of the model."""
        self._identifying = asyncio.create_task(in_own_thread(self._identify), name="receipt identity")

    async def ready(self) -> None:
        """See `Receipts`."""
        assert self._identifying is not None, "no request comes before the server is warm"
        try:
            self._claims = await asyncio.shield(self._identifying)
        except (FilesChanged, OSError) as error:
            raise NotSupported(f"response.receipt_nonce: this server signs no receipts: {error}") from error

    def begin(self, request: Request) -> ReceiptWriter | None:
        """See `Receipts`."""
        wanted = request.outputs.receipt
        if wanted is None:
            return None
        assert self._claims is not None, "`ready` comes first"
        return ReceiptWriter(request, wanted, self._claims, self._library_of, self._signer)

    def _library_of(self, backend: int) -> GrammarLibrary:
        grammar = self._calls.grammar if self._calls is not None else None
        return GrammarLibrary("", "") if grammar is None else grammar.library_of(backend)

    def _identify(self) -> ServerClaims:
        """Return what every receipt says. On its own thread, of the usual priority: with a lower one it could keep the
        GIL from the engine's thread."""
        model, ranks = self._model, self._config.tensor_parallel_size
        try:
            kept: Path | None = cache_dir() / KEPT
        except RuntimeError:  # there is no home directory
            kept = None
        weights = self._files.digest(kept)
        numerics = model.numerics + (f", {ranks} ranks" if ranks > 1 else "")
        log.info("receipts: model %s, numerics %s, key %s", weights[:12], numerics, self._signer.jwk["kid"])
        return ServerClaims(
            model={"type": model.model_type, "weights": weights, "tokenizer": tokenizer_digest(model.tokenizer)},
            engine={"name": DISTRIBUTION, "version": installed_version(), "numerics": numerics},
        )

    async def aclose(self) -> None:
        """Leave the digests; the thread ends with its file."""
        if self._identifying is not None:
            self._identifying.cancel()
            with suppress(asyncio.CancelledError, FilesChanged, OSError):
                await self._identifying

    def __repr__(self) -> str:
        return f"<SignedReceipts {self._signer!r}>"


open = SignedReceipts
