"""Keep the slots of conversations between requests: in memory within limits, and beyond them in files.

All methods run in the event loop; files are written and read in other threads, because they take longer.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import IO, Any

from kvpass import tensor_files
from kvpass.apps.serving.schemas import ApiError
from kvpass.arguments import Positive, check_fields
from kvpass.cache.model_cache import caches_in
from kvpass.decoding.cache_files import load_cache, save_cache
from kvpass.decoding.loop import DecodeLoop
from kvpass.errors import CacheFileError, KVPassError

try:
    import fcntl
except ImportError:  # a platform without advisory locks
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("kvpass.serve")

LOCK = "server.lock"
"""The file in a folder of conversations that its server locks."""
MAX_FAILURES = 3
"""After this number of conversations that cannot be written, no other one is tried in the same turn."""
_CACHE_FILE = re.compile(r"[0-9a-f]{64}\.(\d+\.safetensors|.*unfinished)")
"""Names of the files of caches, and of files that were never finished."""


@dataclasses.dataclass(frozen=True)
class Notes:
    """The fields of a conversation in its file of notes; see `KeptConversation`."""

    tail: Sequence[int]
    ended: bool
    seen: Positive
    evicted: float

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass
class KeptConversation:
    """A conversation between two requests.

    Attributes:
        key: the name of its files, a hash of its id and of the API key that it belongs to.
        tail: its token ids that its cache has not seen.
        ended: whether the last answer ended with a stop token.
        seen: the number of tokens that its cache has seen.
        evicted: how many of these were evicted, the mean over layers and heads.
        cache: its cache; None before the first request, and while it is in a file.
        busy: whether a request continues it.
    """

    key: str
    tail: Sequence[int] = ()
    ended: bool = True
    seen: int = 0
    evicted: float = 0.0
    cache: Any = None
    busy: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its slots in memory."""
        return sum(layer.slots.nbytes for layer in caches_in(self.cache)) if self.cache is not None else 0


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many conversations are kept: `rows` in memory, of `nbytes` of slots, and `count` in all."""

    rows: int = 16
    nbytes: int = 2**30
    count: int = 1024


class ConversationStore:
    """The conversations of one server.

    The least recently used ones go to files first.  A conversation changes only when its request has finished.
    """

    def __init__(self, loop: DecodeLoop, folder: Path, limits: Limits) -> None:
        """Make the folder, or read its conversations, which can be continued.

        Raises:
            KVPassError: the folder cannot be made or read, or another server uses it.
        """
        self.loop, self.folder, self.limits = loop, folder, limits
        self._by_key: collections.OrderedDict[str, KeptConversation] = collections.OrderedDict()
        self._writing = asyncio.Lock()
        self._lock: IO[bytes] | None = None
        path = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(folder)
            for path in sorted(folder.glob("*.json"), key=os.path.getmtime):
                notes = Notes(**json.loads(path.read_text(encoding="utf-8")))
                self._by_key[path.stem] = KeptConversation(path.stem, **vars(notes))
            # A server that ended while it wrote or deleted a conversation left caches without notes.
            _remove_caches(folder, {self._cache_of(conversation) for conversation in self._by_key.values()})
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._unlock()
            raise KVPassError(f"cannot read the conversations in {folder}: {path.name}: {error}") from error

    async def close(self) -> None:
        """Leave the folder to other servers, once no thread writes to it."""
        async with self._writing:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def in_memory(self) -> int:
        """Number of conversations in memory."""
        return sum(conversation.cache is not None for conversation in self._by_key.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of all conversations in memory."""
        return sum(conversation.nbytes for conversation in self._by_key.values())

    @contextlib.asynccontextmanager
    async def turn(self, name: str, owner: str) -> AsyncIterator[KeptConversation]:
        """Give one request a conversation with its cache in memory; a new conversation if the id is unknown.

        Args:
            name: the id that the client gave.
            owner: the API key; each key has its own conversations.

        Raises:
            ApiError: another request continues it, its file cannot be read, or there are too many conversations.
        """
        key = _key(name, owner)
        conversation = self._by_key.get(key)
        if conversation is None:
            if not self.limits.count:
                raise ApiError("this server keeps no conversations", param="conversation", code="unsupported_field")
            if len(self._by_key) >= self.limits.count:
                raise ApiError(
                    f"this server already keeps {len(self._by_key)} conversations, its maximum: delete some",
                    *(429, "rate_limit_error", "conversation"),
                    code="too_many_conversations",
                )
            conversation = self._by_key[key] = KeptConversation(key)
        if conversation.busy:
            raise _conflict(name)
        conversation.busy = True
        try:
            await self._load(conversation)
            yield conversation
        finally:
            conversation.busy = False
            if not conversation.seen:
                self._by_key.pop(key, None)  # its first request did not finish
            else:
                self._by_key.move_to_end(key)
                await self._make_room()  # also after a request that was refused, which brought the cache to memory

    def find(self, name: str, owner: str) -> KeptConversation:
        """Return a conversation, or raise ApiError for an unknown id."""
        conversation = self._by_key.get(_key(name, owner))
        if conversation is None:
            raise ApiError(f"there is no conversation {name!r}", 404, param="conversation", code="not_found")
        return conversation

    async def delete(self, name: str, owner: str) -> None:
        """Forget a conversation, and delete its files; ApiError if there is none or a request continues it."""
        async with self._writing:
            conversation = self.find(name, owner)
            if conversation.busy:
                raise _conflict(name)
            del self._by_key[conversation.key]
            self._notes_of(conversation).unlink(missing_ok=True)  # first: a cache without notes is not a conversation
            _remove_caches(self.folder, [], conversation.key)

    async def save(self) -> None:
        """Write all conversations in memory to files; failures are logged, and do not stop it."""
        for conversation in [candidate for candidate in self._by_key.values() if candidate.cache is not None]:
            await self._offload(conversation)

    async def _load(self, conversation: KeptConversation) -> None:
        """Read the cache of a conversation, if it is in a file."""
        if not conversation.seen or conversation.cache is not None:
            return
        path = self._cache_of(conversation)
        try:
            async with self._writing:
                cache = await asyncio.to_thread(load_cache, path, self.loop)
            if (found := caches_in(cache)[0].length) != conversation.seen:
                raise CacheFileError(f"{path}: it holds {found} tokens, and its notes say {conversation.seen}")
            conversation.cache = cache
        except KVPassError as error:
            message = f"the server cannot read this conversation; serve it with its settings, or delete it: {error}"
            raise ApiError(message, 409, param="conversation") from error

    async def _make_room(self) -> None:
        """Write conversations to files, the least recently used first, until memory is within the limits.

        If one cannot be written it stays in memory, and so do all after `MAX_FAILURES`: the disk may be full.
        """
        failures = 0
        for conversation in list(self._by_key.values()):
            within = self.in_memory <= self.limits.rows and self.nbytes <= self.limits.nbytes
            if within or failures == MAX_FAILURES:
                return
            if conversation.cache is not None and not conversation.busy:
                failures += not await self._offload(conversation)

    async def _offload(self, conversation: KeptConversation) -> bool:
        """Write a conversation to its files; log a failure and return False, after which its cache stays in memory.

        If the request is cancelled meanwhile, the thread still writes, and others wait for it.
        """
        return await asyncio.shield(self._write_away(conversation))

    async def _write_away(self, conversation: KeptConversation) -> bool:
        async with self._writing:
            cache = conversation.cache
            if cache is None or self._by_key.get(conversation.key) is not conversation:
                return True
            names = [field.name for field in dataclasses.fields(Notes)]
            notes = json.dumps({name: getattr(conversation, name) for name in names})
            files = self._cache_of(conversation), self._notes_of(conversation)
            try:
                await asyncio.to_thread(_write, cache, notes, *files)
            except (KVPassError, OSError) as error:
                log.error(
                    "a conversation of %d tokens cannot be written to %s and stays in memory: %s; free space there, or "
                    "give the server another folder",
                    *(conversation.seen, self.folder, error),
                )
                return False
            if not conversation.busy and conversation.cache is cache:  # else a request has come for it meanwhile
                conversation.cache = None
            return True

    def _cache_of(self, conversation: KeptConversation) -> Path:
        """Return the file of a cache, which names its number of tokens, so that notes belong to their cache."""
        return self.folder / f"{conversation.key}.{conversation.seen}.safetensors"

    def _notes_of(self, conversation: KeptConversation) -> Path:
        return self.folder / f"{conversation.key}.json"


def lock_folder(folder: Path) -> IO[bytes] | None:
    """Return a file whose lock lasts until it is closed or the process ends; None where there are no locks.

    Raises:
        KVPassError: another server has the lock.
        OSError: the file cannot be made.
    """
    if fcntl is None:
        return None
    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise KVPassError(
            f"another server uses the folder {folder}; stop it, or give this one another folder with --folder"
        ) from None
    except OSError as error:  # some network file systems have no locks
        file.close()
        log.warning("the folder %s cannot be locked: %s; let only one server use it", folder, error)
        return None
    return file


def _write(cache: Any, notes: str, path: Path, notes_path: Path) -> None:
    """Write the cache, then the notes that name it, and remove the caches of earlier notes."""
    save_cache(cache, path)
    tensor_files.write_text(notes_path, notes, CacheFileError)
    _remove_caches(path.parent, [path], notes_path.stem)


def _remove_caches(folder: Path, kept: Collection[Path], key: str = "") -> None:
    """Remove the files of caches, unfinished ones too, except `kept`: of one conversation, or of all."""
    for path in folder.iterdir():
        if path.name.startswith(key) and _CACHE_FILE.fullmatch(path.name) and path not in kept:
            path.unlink(missing_ok=True)


def _conflict(name: str) -> ApiError:
    return ApiError(f"a request of conversation {name!r} is running", 409, param="conversation", code="conflict")


def _key(name: str, owner: str) -> str:
    """Return a name for files that reveals nothing about the API key and works for any id."""
    return hashlib.sha256(f"{hashlib.sha256(owner.encode()).hexdigest()}{name}".encode()).hexdigest()
