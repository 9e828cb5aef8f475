# SPDX-License-Identifier: Apache-2.0
"""Who reads what, and where they stopped: corpora, their order, and how they are prepared."""

from raydist.data.corpus import Corpus, CorpusManifest, read_manifest
from raydist.data.order import sample_indices
from raydist.data.prepare import CorpusSource, find_source, map_in_process, prepare

__all__ = [
    "Corpus",
    "CorpusManifest",
    "CorpusSource",
    "find_source",
    "map_in_process",
    "prepare",
    "read_manifest",
    "sample_indices",
]
