"""Every key of the protocol, built here and nowhere else.

The pool's name is the hash tag of its keys: on a cluster a pool has one slot. Beside the pools, `tenants`,
`files` and `arq` are tags. No script or transaction spans two tags.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

POOLS = "hr:pools"
API_KEYS = "hr:{tenants}:keys"  # zset of key ids, score = when made, ms
WEBHOOK_SECRETS = "hr:webhook-secrets"
ARQ_TAG = "arq"  # of all keys of arq, whose transactions span them
WEBHOOK_QUEUE = "hr:{arq}:webhooks"
TASK_QUEUE = "hr:{arq}:tasks"
GROUP = "workers"
_POOL_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JOB_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def this_month() -> str:
    """The ledger's month, in UTC. A clock that is off moves its edge and nothing else."""
    return time.strftime("%Y-%m", time.gmtime())


def valid_pool(name: str) -> bool:
    return _POOL_NAME.fullmatch(name) is not None


def valid_job_id(job_id: str) -> bool:
    return _JOB_ID.fullmatch(job_id) is not None


def arq_id(task_id: str) -> str:
    """A task's id within arq, which makes keys of it."""
    return f"{{{ARQ_TAG}}}:{task_id}"


def api_key(key_id: str) -> str:
    """Hash of one API key: its digest, its tenant, never the key itself."""
    return f"hr:{{tenants}}:key:{key_id}"


def tenant_policy(tenant: str) -> str:
    """String: what a tenant may do, JSON."""
    return f"hr:{{tenants}}:policy:{tenant}"


def tenant_rate(tenant: str) -> str:
    """Hash: the levels of a tenant's token buckets."""
    return f"hr:{{tenants}}:rate:{tenant}"


BATCHES_DUE = "hr:{files}:due"  # zset of batches under way: score = when to look next, ms


def file_key(file_id: str) -> str:
    """Hash of one uploaded or written file, without its content."""
    return f"hr:{{files}}:file:{file_id}"


def file_data(file_id: str) -> str:
    """List of the file's content, piece by piece."""
    return f"hr:{{files}}:data:{file_id}"


def tenant_files(tenant: str) -> str:
    """Zset of a tenant's files: score = when they expire, ms."""
    return f"hr:{{files}}:files:{tenant}"


def tenant_bytes(tenant: str) -> str:
    """Hash of a tenant's files to their sizes, bytes."""
    return f"hr:{{files}}:bytes:{tenant}"


def batch_key(batch_id: str) -> str:
    """Hash of one batch."""
    return f"hr:{{files}}:batch:{batch_id}"


def batch_open(batch_id: str) -> str:
    """Hash of a batch's lines whose jobs have not been written down as ended: line to job, JSON."""
    return f"hr:{{files}}:open:{batch_id}"


def tenant_batches(tenant: str) -> str:
    """Zset of a tenant's batches: score = when they expire, ms."""
    return f"hr:{{files}}:batches:{tenant}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool. Raises ValueError for a name that cannot be a hash tag."""

    pool: str

    def __post_init__(self) -> None:
        if not valid_pool(self.pool):
            raise ValueError(f"pool name {self.pool!r}: 1 to 64 of A-Z a-z 0-9 . _ -")

    def _key(self, rest: str) -> str:
        return f"hr:{{{self.pool}}}:{rest}"

    def queue(self, job_class: str) -> str:
        return self._key(f"q:{job_class}")

    def ready(self, job_class: str) -> str:
        return self._key(f"ready:{job_class}")

    @property
    def vtime(self) -> str:
        return self._key("vtime")

    @property
    def deadlines(self) -> str:
        """Zset of entries that have a deadline: member `<class>-<entry id>`, score = ms of Redis's clock."""
        return self._key("deadlines")

    @property
    def ids(self) -> str:
        """Hash `<class>-<entry id>` to job id, of entries under way whose producer chose the id."""
        return self._key("ids")

    @property
    def suspects(self) -> str:
        """Hash of entries whose worker may have died over them: member to how many it ran, and its name."""
        return self._key("suspects")

    @property
    def leases(self) -> str:
        return self._key("leases")

    def job(self, job_id: str) -> str:
        return self._key(f"job:{job_id}")

    def log(self, job_id: str) -> str:
        return self._key(f"log:{job_id}")

    def live(self, job_id: str) -> str:
        return self._key(f"live:{job_id}")

    @property
    def ctl(self) -> str:
        return self._key("ctl")

    def worker(self, worker_id: str) -> str:
        return self._key(f"worker:{worker_id}")

    @property
    def workers(self) -> str:
        """Zset of worker ids: score = when the card expires, ms of Redis's clock."""
        return self._key("workers")

    @property
    def dead(self) -> str:
        return self._key("dead")

    @property
    def undecodable(self) -> str:
        return self._key("undecodable")

    @property
    def hooks(self) -> str:
        """Stream of ends that somebody is to be told of: `job`, `url`, `tenant`, `status`, `at`."""
        return self._key("hooks")

    def usage(self, month: str) -> str:
        """Hash of one month (`2026-11`, UTC): `<tenant>:<kind>` to a number. See `headrace.usage`."""
        return self._key(f"usage:{month}")

    def response(self, response_id: str) -> str:
        """Hash of a stored response; its job has the same id."""
        return self._key(f"response:{response_id}")

    @property
    def open_responses(self) -> str:
        """Zset of stored responses whose answer is only the job's yet: score = when created, ms."""
        return self._key("open-responses")

    def delivery(self, delivery_id: str) -> str:
        """Hash of one webhook: what is to be sent, where, and what came of it."""
        return self._key(f"delivery:{delivery_id}")

    def deliveries(self, tenant: str) -> str:
        """Zset of a tenant's deliveries: score = when the job ended, ms."""
        return self._key(f"deliveries:{tenant}")

    @property
    def due(self) -> str:
        """Zset of deliveries not yet settled: score = when to try next, ms."""
        return self._key("due")

    def idem(self, tenant: str, key: str) -> str:
        return self._key(f"idem:{tenant}:{key}")
