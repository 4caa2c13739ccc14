"""Every error that tenuto raises on purpose, in one tree.

    TenutoError                     1   anything of ours
    ├── UsageError                  2   the caller asked for something that makes no sense
    │   ├── ConfigError             2   an unknown key, or a value out of range
    │   ├── NameRefused             2   a session, pin or tenant name that may not be one
    │   └── Unsupported             2   something that others offer, and this does not
    ├── ModelError                 10
    │   ├── ModelNotFound          11   no such model file, folder or catalogue entry
    │   ├── UnknownArchitecture    12   a model family that the engine has no file for
    │   ├── WeightsRefused         13   a model file that is damaged or incomplete
    │   ├── DownloadFailed         14   a model could not be fetched
    │   ├── NoChatTemplate         15   chat asked of a model that has no template
    │   ├── TemplateRefused        16   a chat template that is broken or refuses these messages
    │   └── CacheRefused           17   a model of another library whose state cannot be held whole
    ├── EngineError                20
    │   ├── ContextFull            21   the sequence has no room for these tokens
    │   ├── NoSlot                 22   the cache has no free cells (or sequences) left
    │   ├── EditRefused            23   a rewind, shift or removal that this memory cannot do exactly
    │   ├── BatchRefused           24   tokens or positions that do not follow the sequence
    │   ├── DeviceMissing          25   the device asked for is not there
    │   ├── HandleRefused          26   a device state that is stale, freed, removed or another engine's
    │   └── RankLost               27   a process that held a part of the model ended, or does not answer
    ├── StateError                 30   a stored state that cannot be believed
    │   ├── Corrupt                31   bytes that are not what their digest or frame says
    │   ├── UnknownVersion         32   a format version this build does not read
    │   ├── UnknownFeature         33   a feature, codec or kind this build does not know
    │   ├── LimitExceeded          34   a declared size beyond what is allowed
    │   ├── FingerprintMismatch    35   made by another model, RoPE, dtype, rotation or tokenizer
    │   ├── BlobMissing            36   stored bytes that are no longer there
    │   ├── AmbiguousFormat        37   a foreign file that can be read in ways that mean different things
    │   ├── Unproven               38   imported rows that the model does not compute, or nothing can prove
    │   └── UnknownFormat          39   a file of no kind that is read here, or of one that is never opened
    ├── StoreError                 40
    │   ├── StoreUnavailable       41   the server or folder cannot be reached
    │   ├── StoreFull              42   no room left on the device
    │   ├── IndexDamaged           43   the store's own index is broken (`check --repair` rebuilds it)
    │   └── QuotaExceeded          44   the tenant stores as much as it may
    ├── SessionError               50
    │   ├── SessionNotFound        51
    │   │   └── SessionExpired     51   it was there, and the store lost it: evicted, or restarted empty
    │   ├── SessionExists          52   a name that is taken
    │   ├── SessionAmbiguous       53   a prefix of an id that fits several sessions
    │   ├── StaleSession           54   the session moved on since it was read
    │   ├── LeaseHeld              55   another process is writing to the session
    │   ├── LeaseLost              56   our own lease ended, or was taken over
    │   ├── NoCheckpoint           57   the session cannot be resumed at that position
    │   ├── ProblemsFound          58   `check` found something wrong
    │   └── Drifted                59   `verify` found that stored rows say otherwise than the model does
    ├── ServiceError               60
    │   ├── Busy                   61   as many turns run and wait as may
    │   ├── Draining               62   the service is being ended, and takes no more turns
    │   ├── ServiceUnreachable     63   a service that does not answer, or does not let itself be watched
    │   ├── IdempotencyKeyReused   64   something else was asked for under this key before
    │   └── TurnLost               65   the store is behind what it had acknowledged: a failover lost a turn
    └── KeysError                  70
        ├── KeyRefused             71   an API key that is none of ours, or was revoked
        ├── SealRefused            72   a sealed store without its keys, or keys where nothing is sealed
        ├── KeyFileRefused         73   a key file that is damaged, missing, or that others may read
        └── Erased                 74   its keys were destroyed: nobody can read it any more

The number is the exit code of the command line. A message is one line, written for the person
who reads it; `details` holds what a program may want to know.
"""

from __future__ import annotations


class TenutoError(Exception):
    """Root of the tree. `str(error)` is one line for people."""

    exit_code = 1

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details: dict[str, object] = details


class UsageError(TenutoError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class NameRefused(UsageError):
    pass


class Unsupported(UsageError):
    pass


class ModelError(TenutoError):
    exit_code = 10


class ModelNotFound(ModelError):
    exit_code = 11


class UnknownArchitecture(ModelError):
    exit_code = 12


class WeightsRefused(ModelError):
    exit_code = 13


class DownloadFailed(ModelError):
    exit_code = 14


class NoChatTemplate(ModelError):
    exit_code = 15


class TemplateRefused(ModelError):
    exit_code = 16


class CacheRefused(ModelError):
    exit_code = 17


class EngineError(TenutoError):
    exit_code = 20


class ContextFull(EngineError):
    exit_code = 21


class NoSlot(EngineError):
    exit_code = 22


class EditRefused(EngineError):
    exit_code = 23


class BatchRefused(EngineError):
    exit_code = 24


class DeviceMissing(EngineError):
    exit_code = 25


class HandleRefused(EngineError):
    exit_code = 26


class RankLost(EngineError):
    exit_code = 27


class StateError(TenutoError):
    exit_code = 30


class Corrupt(StateError):
    exit_code = 31


class UnknownVersion(StateError):
    exit_code = 32


class UnknownFeature(StateError):
    exit_code = 33


class LimitExceeded(StateError):
    exit_code = 34


class FingerprintMismatch(StateError):
    exit_code = 35


class BlobMissing(StateError):
    exit_code = 36


class AmbiguousFormat(StateError):
    exit_code = 37


class Unproven(StateError):
    exit_code = 38


class UnknownFormat(StateError):
    exit_code = 39


class StoreError(TenutoError):
    exit_code = 40


class StoreUnavailable(StoreError):
    exit_code = 41


class StoreFull(StoreError):
    exit_code = 42


class IndexDamaged(StoreError):
    exit_code = 43


class QuotaExceeded(StoreError):
    exit_code = 44


class SessionError(TenutoError):
    exit_code = 50


class SessionNotFound(SessionError):
    exit_code = 51


class SessionExpired(SessionNotFound):
    pass


class SessionExists(SessionError):
    exit_code = 52


class SessionAmbiguous(SessionError):
    exit_code = 53


class StaleSession(SessionError):
    exit_code = 54


class LeaseHeld(SessionError):
    exit_code = 55


class LeaseLost(SessionError):
    exit_code = 56


class NoCheckpoint(SessionError):
    exit_code = 57


class ProblemsFound(SessionError):
    exit_code = 58


class Drifted(SessionError):
    exit_code = 59


class ServiceError(TenutoError):
    exit_code = 60


class Busy(ServiceError):
    exit_code = 61


class Draining(ServiceError):
    exit_code = 62


class ServiceUnreachable(ServiceError):
    exit_code = 63


class IdempotencyKeyReused(ServiceError):
    exit_code = 64


class TurnLost(ServiceError):
    exit_code = 65


class KeysError(TenutoError):
    exit_code = 70


class KeyRefused(KeysError):
    exit_code = 71


class SealRefused(KeysError):
    exit_code = 72


class KeyFileRefused(KeysError):
    exit_code = 73


class Erased(KeysError):
    exit_code = 74
