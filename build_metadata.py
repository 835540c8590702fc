"""What of the package's metadata depends on where it is built: links to its repository.

A metadata hook of hatchling (https://hatch.pypa.io/latest/plugins/metadata-hook/custom). The page of an index shows the
README, whose links are relative: they are made absolute, to the files of the version's tag. The workflow that publishes
says where the repository is. Elsewhere nobody knows, and the README stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "XLA_ADAPTERS_REPOSITORY"
# The target of a link, and the source of a picture, if they are paths.
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")
_PICTURE = re.compile(r'src="(?![a-z]+:)([^"]+)"')


class Links(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """As of `MetadataHookInterface`."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = os.environ.get(VARIABLE, "").rstrip("/")
        if address:
            tag = f"v{metadata['version']}"
            text = _LINK.sub(rf"]({address}/blob/{tag}/\1)", text)
            text = _PICTURE.sub(rf'src="{address}/raw/{tag}/\1"', text)
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/blob/{tag}/docs/index.md",
                "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
