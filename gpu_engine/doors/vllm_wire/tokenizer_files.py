"""The model's tokenizer as a zip archive of its files, for a gateway that tokenises.

Invariant: equal tokenizers give equal bytes, so that a gateway finds an archive that it has by the digest.

Not responsible for: sending the archive (see vllm_servicer.py).
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gpu_engine.api.ports import Tokenizer

CHUNK_BYTES = 64 << 10
"""Size of a message that smg's client expects."""
_OLDEST = (1980, 1, 1, 0, 0, 0)
"""The time of every file: the first that the format can express."""


@dataclass(frozen=True, slots=True, repr=False)
class TokenizerFiles:
    """A zip archive."""

    content: bytes
    sha256: str

    def chunks(self) -> list[bytes]:
        """Return the content in pieces of at most CHUNK_BYTES."""
        return [self.content[at : at + CHUNK_BYTES] for at in range(0, len(self.content), CHUNK_BYTES)]

    def __repr__(self) -> str:
        return f"<TokenizerFiles {len(self.content)} bytes {self.sha256[:12]}>"


def tokenizer_files(tokenizer: Tokenizer) -> TokenizerFiles:
    """Write the tokenizer to files and pack them. Blocks for a second with a large vocabulary."""
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="lockstep-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                entry = zipfile.ZipInfo(str(path.relative_to(folder)), _OLDEST)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
    content = packed.getvalue()
    return TokenizerFiles(content, hashlib.sha256(content).hexdigest())
