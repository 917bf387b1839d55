"""Everything that can be set on a gateway."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from services.common.jobs.scorers.allowed_webhooks import covers, webhook_parts
from services.common.security.api_keys import MAX_PER_MINUTE
from services.common.security.webhook_signatures import signing_key
from services.common.settings import CommonSettings
from services.common.shutdown import CLOSE_SECONDS
from services.gateway.core.addresses import EngineTarget, ListenSettings
from services.gateway.rate_limits.limits import Limits

_ORIGIN = re.compile(r"https?://(?:[a-z0-9._-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?")

CacheScope: TypeAlias = Literal["auto", "shared", "key"]


class GatewaySettings(ListenSettings, CommonSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    own_port: int = Field(0, ge=0, le=65535)
    """Port on 127.0.0.1 where this gateway answers as well. `port` is then shared with others of this machine that have
    one: a connection to it reaches any of them. 0: `port` is this gateway's alone."""
    engines: str = "127.0.0.1:50051"
    """The engines, separated by commas: host:port is one, dns:///name:port stands for all addresses of a name (a
    headless service), which is looked up again and again."""
    engines_dns_seconds: float = Field(5.0, gt=0)
    """Pause between two look-ups of a name in `engines`. While it has no answer, the engines known stay."""
    grpc_tls_server_name: str = ""
    """The DNS name in the engines' certificates, where they are dialled by address, as those of a headless service are;
    empty: the host in `engines`. Only with TEMPER_GRPC_TLS_CERT."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Largest JSON body; more is answered with 413."""
    max_upload_bytes: int = Field(2 * 2**30, ge=1024)
    """Largest adapter upload."""
    adapters_dir: Path | None = None
    """Directory of PEFT adapters that may be loaded by path (/v1/load_lora_adapter). Each directory in it that holds an
    adapter is loaded when the gateway starts, under the directory's name. None: paths are refused."""
    adapters_s3: str = ""
    """Prefixes of the object store's server that adapters may be loaded from, separated by commas:
    "s3://bucket/adapters". Empty: s3:// is refused."""
    webhooks: bool = True
    """This gateway sends to webhooks, with others that do."""
    webhook_urls: str = ""
    """URLs that are told when a job, a canary or a learner's cycle ends, separated by commas. Empty: none."""
    webhook_secret: SecretStr = SecretStr("")
    """Secret that requests to webhooks are signed with: "whsec_" and base64, as Standard Webhooks has it, or at least
    16 characters. Two of them, separated by a space, sign both, so that it can be changed."""
    webhook_allow: str = ""
    """Prefixes of URLs that a job may name as its `webhook`, separated by commas. Empty: a job may name none."""
    webhook_private: bool = False
    """Webhooks may be at loopback and private addresses, too. Link-local ones are never called."""
    webhook_timeout_seconds: float = Field(10.0, gt=0, le=60)
    """Time that an attempt to reach a webhook may take."""
    webhook_attempts: int = Field(10, ge=1, le=20)
    """Attempts after which an event is given up for a webhook; about a day by the default pauses."""
    webhook_retry_seconds: float = Field(5.0, gt=0)
    """Pause before the second attempt; each later one is four times as long, up to six hours."""
    max_session_bytes: int = Field(16 * 2**30, ge=1024)
    """Largest file of a session that may be imported."""
    tinker_base_model: str = Field("", max_length=256, pattern=r"^[A-Za-z0-9._/-]*$")
    """Name under which Tinker's SDK knows the model, beside the served name: as the name on Hugging Face from which the
    SDK loads the tokenizer. Empty: the served name."""
    session_call_tokens: int = Field(65536, ge=2)
    """Most tokens of one call of a training session, as engines have it: Tinker's SDK splits its calls by that."""
    max_in_flight: int = Field(1024, ge=1)
    """Completions (choices) in the gateway at a time; more are answered with 503 and Retry-After."""
    max_choices: int = Field(128, ge=1)
    """Largest `n`, and most choices of one request (prompts x n)."""
    max_inputs: int = Field(2048, ge=1)
    """Texts of one request for embeddings or scores; as many as `max_choices` are read at a time."""
    max_prompt_logprobs: int = Field(2**17, ge=1)
    """Log-probabilities of prompt tokens that one answer may have: tokens x (1 + alternatives)."""
    default_max_tokens: int = Field(4096, ge=1)
    """Tokens a chat may generate when the request sets no limit and the context leaves room."""
    request_timeout_seconds: float = Field(600.0, gt=0)
    """Longest life of a completion, queueing included."""
    pause_seconds: float = Field(120.0, gt=0, le=3600)
    """Longest pause of engines by `POST /pause`; then they go on by themselves."""
    engine_retry_seconds: float = Field(20.0, ge=0)
    """Time that a request without a token yet waits for another engine, or for this one to come back."""
    engine_start_seconds: float = Field(0.0, ge=0)
    """Time that a completion, embedding or score waits for an engine while none takes requests, as one that is started
    for it does: where engines are scaled to zero. It counts as part of the request's time. 0: only as long as
    engine_retry_seconds, and only if one was ready a short while ago."""
    engine_attempts: int = Field(8, ge=1)
    """Most engines that a request without a token yet is sent to, one after the other; the same one counts again."""
    status_interval_seconds: float = Field(1.0, gt=0)
    """Pause between two GetStatus calls to an engine."""
    status_timeout_seconds: float = Field(5.0, gt=0)
    """An engine that takes longer to say its status gets nothing new until it says it."""
    prefix_index_blocks: int = Field(65536, ge=1)
    """Blocks of 64 prompt tokens that are remembered for each engine, to send equal beginnings there again."""
    sticky_sessions: int = Field(65536, ge=1)
    """Most `session_id`s whose engine is remembered; the one longest unused is forgotten first."""
    cache_scope: CacheScope = "auto"
    """Scope within which requests share cached prompt state: "shared": those of all API keys; "key": those of one key;
    "auto": "key" where there are keys. By how soon it is answered, a client can learn whether somebody in the scope has
    sent the same beginning before."""
    breaker_failures: int = Field(5, ge=1)
    """Failures in a row (steps, or connections lost with requests) after which an engine gets nothing for a while."""
    breaker_window_seconds: float = Field(30.0, gt=0)
    """Failures further apart than this are not in a row."""
    breaker_open_seconds: float = Field(2.0, gt=0)
    """Time that a failing engine gets nothing the first time; then one request, and twice as long if that fails."""
    breaker_open_max_seconds: float = Field(60.0, gt=0)
    """Longest time that an engine gets nothing before it is tried again."""
    sync_timeout_seconds: float = Field(10.0, gt=0)
    """Time that an attach, detach or upload waits for the engines to serve it."""
    validate_timeout_seconds: float = Field(120.0, gt=0)
    """Time that an engine may take to check an uploaded adapter."""
    keep_alive_seconds: float = Field(15.0, gt=0)
    """Pause after which a silent event stream gets a comment line, so that proxies keep it open."""
    stream_start_seconds: float = Field(2.0, ge=0)
    """Time that a stream waits for its first token before its headers are sent (at most keep_alive_seconds). A failure
    until then has its own HTTP status; after that it is an event of a 200."""
    write_timeout_seconds: float = Field(30.0, gt=0)
    """A client that takes nothing of its answer for so long is cut off, and its request ended."""
    offload_chars: int = Field(16384, ge=0)
    """Longer prompts are rendered and tokenized in a thread, not on the event loop."""
    max_schema_bytes: int = Field(65536, ge=64)
    """Largest JSON schema that constrains an answer, in bytes of JSON."""
    max_schema_depth: int = Field(32, ge=1)
    """Deepest nesting of objects and lists in a JSON schema."""
    max_schema_properties: int = Field(1000, ge=1)
    """Most properties in a JSON schema, all its objects together."""
    max_regex_chars: int = Field(4096, ge=1)
    """Longest regular expression that constrains an answer, a schema's patterns included."""
    max_grammar_bytes: int = Field(262144, ge=64)
    """Largest grammar that constrains an answer, that of tool calls included; also all texts of a choice together."""
    max_constraint_choices: int = Field(1024, ge=1)
    """Most texts that an answer may be chosen from."""
    reasoning_budget_minimal: int = Field(512, ge=0)
    """Tokens of thinking under reasoning_effort "minimal"."""
    reasoning_budget_low: int = Field(2048, ge=0)
    """Tokens of thinking under reasoning_effort "low"."""
    reasoning_budget_medium: int = Field(8192, ge=0)
    """Tokens of thinking under reasoning_effort "medium"."""
    reasoning_budget_high: int = Field(24576, ge=0)
    """Tokens of thinking under reasoning_effort "high"."""
    reasoning_budget_xhigh: int = Field(81920, ge=0)
    """Tokens of thinking under reasoning_effort "xhigh"."""
    reasoning_closing: str = (
        "Considering the limited time by the user, I have to give the solution based on the thinking directly now."
    )
    """Text that ends the model's thinking when its budget is used up, a paragraph of its own before the closing tag.
    The words are Qwen's: its models have learnt to answer after them. Empty: the tag alone."""
    max_file_bytes: int = Field(200 * 2**20, ge=1024)
    """Largest file of /v1/files."""
    batch_workers: int = Field(2, ge=0, le=64)
    """Batches that this gateway runs at a time; 0: it runs none, and other gateways do."""
    batch_concurrency: int = Field(32, ge=1, le=4096)
    """Requests of batches that this gateway runs at a time."""
    batch_priority: int = Field(100, ge=-(2**31), lt=2**31)
    """Priority of a batch's request that sets none. Users' requests have 0, and lower is served first."""
    batch_max_requests: int = Field(50_000, ge=1)
    """Lines of a batch's input file."""
    batch_max_unfinished: int = Field(100, ge=1, le=1000)
    """Batches of one API key that have not ended; more are answered with 429. Without keys, of all together."""
    batch_heartbeat_seconds: float = Field(2.0, gt=0)
    """Interval at which a gateway says that it is still at a batch, and asks whether to cancel it."""
    batch_reclaim_seconds: float = Field(30.0, gt=0)
    """Silence after which a batch's gateway counts as dead and another goes on; several heartbeats."""
    batch_max_attempts: int = Field(3, ge=1)
    """Deaths of gateways within a batch, without a result in between, after which it fails."""
    drain_delay_seconds: float = Field(0.0, ge=0)
    """After SIGTERM the gateway says at once that it is not ready, but accepts connections for so long: those who send
    requests hear of it a little later. Put it above the time that takes; Kubernetes needs about 5."""
    shutdown_grace_seconds: int = Field(30, ge=0)
    """Time that running responses may go on once no connection is accepted any more; then they end with an error."""
    api_keys_file: str = ""
    """File of API keys, as `temper keys` writes it. Empty: no keys, everybody may do everything."""
    api_keys_poll_seconds: float = Field(2.0, gt=0)
    """Pause between two looks at the key file."""
    key_requests_per_minute: int = Field(0, ge=0, le=MAX_PER_MINUTE)
    """Requests a minute of a key that has no limit of its own; 0: no limit."""
    key_tokens_per_minute: int = Field(0, ge=0, le=MAX_PER_MINUTE)
    """Tokens a minute, prompts and completions together, of a key that has no limit of its own; 0: no limit."""
    key_concurrent_requests: int = Field(0, ge=0)
    """Requests at a time of a key that has no limit of its own; 0: no limit."""
    ui: bool = True
    """The dashboard is served at /ui. What it shows and does is asked of the API with its reader's API key."""
    metrics_public: bool = True
    """/metrics needs no API key."""
    metrics_by_key: bool = False
    """Tokens are counted by API key, too: a series a key and kind, named by the key's id."""
    audit_log_file: str = ""
    """Appended to, beside the log: a JSON object for every call that trains or administrates. Empty: no such file."""
    cors_allow_origins: str = ""
    """Origins whose web pages may call the gateway, separated by commas: "https://chat.example.com". Empty: none."""
    allowed_hosts: str = ""
    """Names by which a gateway without API keys may be called on loopback, separated by commas, beside localhost, names
    without a dot and addresses: "temper.example.com" behind a proxy of this machine that passes Host on."""
    trusted_proxies: str = ""
    """Addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed, separated by commas:
    "10.0.0.0/8". The log and the audit log then have the client's address. Empty: nobody's."""
    max_bodies_bytes: int = Field(256 * 2**20, ge=1024)
    """JSON bodies in memory at a time, together, but at least one of the largest; more are answered with 503."""
    body_timeout_seconds: float = Field(60.0, gt=0)
    """Time that a JSON body may take to arrive, or an upload to send its next piece."""
    max_messages: int = Field(4096, ge=1, le=4096)
    """Most messages of one chat."""
    max_prompt_tokens: int = Field(0, ge=0)
    """Longest prompt; 0: what the model's context allows."""
    responses_ttl_seconds: int = Field(7 * 86400, ge=1)
    """Time that a response of /v1/responses, a stored chat or a conversation is kept in Redis after its last change."""
    response_max_bytes: int = Field(4 * 2**20, ge=1024)
    """Largest response, stored chat or conversation, with everything that belongs to it, in bytes of JSON."""
    responses_max_bytes: int = Field(256 * 2**20, ge=0)
    """Bytes of all responses, stored chats and conversations together; the oldest make room for new ones. Redis holds
    the jobs, too. 0: none is kept."""
    responses_key_max_bytes: int = Field(64 * 2**20, ge=0)
    """Bytes of what one API key keeps of them; its own oldest make room. Without keys, of all together."""
    request_log: bool = False
    """Requests are logged, with what they were answered: of each API key a share, its own or `request_log_share`."""
    request_log_share: float = Field(1.0, ge=0, le=1)
    """Share of the requests that are logged, whole sessions at a time, of API keys that have no `log_share`."""
    request_log_rules: Path | None = None
    """TOML file of what is left out (`leave_out`) and replaced (`patterns`) before anything is written."""
    request_log_ttl_seconds: int = Field(30 * 86400, ge=3600)
    """Age at which logged requests are removed, by whole days (UTC)."""
    request_log_part_seconds: float = Field(5.0, gt=0, le=60)
    """Time for which a gateway gathers requests before it writes them; they are found shortly after."""
    request_log_spool: Path = Path("/tmp/temper-request-log")
    """Directory of logged requests that the object store does not have yet. What a killed gateway leaves in it, the
    next one hands on."""
    request_log_spool_bytes: int = Field(256 * 2**20, ge=2**20)
    """Bytes in the spool at which requests are left out of the log, and counted."""
    feedback_ttl_seconds: int = Field(180 * 86400, ge=1)
    """Age at which feedback is forgotten; data sets that have used it keep what they have."""
    learners: bool = True
    """This gateway may be the one that acts for learners (/v1/learners)."""
    feedback_max_bytes: int = Field(256 * 2**20, ge=0)
    """Bytes of all feedback together, which Redis holds; more is refused with 503. 0: none is kept."""
    max_background_responses: int = Field(64, ge=0)
    """Background responses that one gateway runs at a time; more are answered with 503. 0: none."""
    response_beat_seconds: float = Field(1.0, gt=0)
    """Pause between two signs of life of background responses; a cancelled one ends within it."""
    response_lease_seconds: float = Field(30.0, gt=0, validate_default=True)
    """Silence after which a background response counts as lost together with its gateway, and as failed."""

    @field_validator("batch_reclaim_seconds")
    @classmethod
    def _outlives_heartbeats(cls, seconds: float, info: ValidationInfo) -> float:
        heartbeat = info.data.get("batch_heartbeat_seconds")
        if heartbeat is not None and seconds < 2 * heartbeat:
            raise ValueError(f"must be at least two heartbeats (TEMPER_BATCH_HEARTBEAT_SECONDS is {heartbeat})")
        return seconds

    @field_validator("response_lease_seconds")
    @classmethod
    def _outlives_beats(cls, lease: float, info: ValidationInfo) -> float:
        beat = info.data.get("response_beat_seconds", 0.0)
        if lease < 3 * beat:
            raise ValueError(
                f"it is {lease:g}, less than three times TEMPER_RESPONSE_BEAT_SECONDS ({beat:g}): one late beat would "
                "lose a response"
            )
        return lease

    def reasoning_budget(self, effort: Literal["minimal", "low", "medium", "high", "xhigh", "max"]) -> int:
        """Tokens of thinking under a reasoning_effort. "max" is another name of "xhigh"."""
        return {
            "minimal": self.reasoning_budget_minimal,
            "low": self.reasoning_budget_low,
            "medium": self.reasoning_budget_medium,
            "high": self.reasoning_budget_high,
            "xhigh": self.reasoning_budget_xhigh,
            "max": self.reasoning_budget_xhigh,
        }[effort]

    @field_validator("engines")
    @classmethod
    def _readable(cls, engines: str) -> str:
        for entry in _entries(engines):
            EngineTarget.parse(entry)
        return engines

    @model_validator(mode="after")
    def _ordered(self) -> GatewaySettings:
        if self.breaker_open_seconds > self.breaker_open_max_seconds:
            raise ValueError(
                f"breaker_open_seconds ({self.breaker_open_seconds:g}) must be at most breaker_open_max_seconds "
                f"({self.breaker_open_max_seconds:g})"
            )
        if self.grpc_tls_server_name and self.grpc_tls_cert is None:
            raise ValueError("TEMPER_GRPC_TLS_SERVER_NAME does nothing without TEMPER_GRPC_TLS_CERT, _KEY and _CA")
        if (self.webhook_urls or self.webhook_allow) and not self.webhook_secret.get_secret_value():
            raise ValueError("TEMPER_WEBHOOK_URLS and _ALLOW need TEMPER_WEBHOOK_SECRET: events are signed")
        if self.cache_scope == "key" and not self.api_keys_file:
            raise ValueError("TEMPER_CACHE_SCOPE=key does nothing without TEMPER_API_KEYS_FILE: all callers are one")
        return self

    @property
    def termination_seconds(self) -> float:
        """SIGTERM to exit, at most: what Kubernetes' terminationGracePeriodSeconds has to allow."""
        return self.drain_delay_seconds + self.shutdown_grace_seconds + CLOSE_SECONDS

    @property
    def engine_targets(self) -> tuple[EngineTarget, ...]:
        """The entries of `engines`, each once, in the order given."""
        return tuple(dict.fromkeys(EngineTarget.parse(entry) for entry in _entries(self.engines)))

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The origins, each once."""
        return tuple(dict.fromkeys(_entries(self.cors_allow_origins)))

    @property
    def webhook_endpoints(self) -> tuple[str, ...]:
        """The URLs of `webhook_urls`, each once."""
        return tuple(dict.fromkeys(_entries(self.webhook_urls)))

    @property
    def webhook_prefixes(self) -> tuple[str, ...]:
        """The prefixes of `webhook_allow`, each once."""
        return tuple(dict.fromkeys(_entries(self.webhook_allow)))

    def allows_webhook(self, url: str) -> bool:
        """Whether a job may name this URL."""
        return any(covers(prefix, url) for prefix in self.webhook_prefixes)

    @property
    def webhook_keys(self) -> tuple[bytes, ...]:
        """Keys that requests to webhooks are signed with."""
        return tuple(signing_key(secret) for secret in self.webhook_secret.get_secret_value().split())

    @property
    def s3_sources(self) -> tuple[str, ...]:
        """Prefixes of `adapters_s3` without a slash at their ends, each once."""
        return tuple(dict.fromkeys(entry.rstrip("/") for entry in _entries(self.adapters_s3)))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of `allowed_hosts`, each once."""
        return tuple(dict.fromkeys(_entries(self.allowed_hosts)))

    @property
    def bodies_limit(self) -> int:
        """Bytes of all JSON bodies together."""
        return max(self.max_bodies_bytes, self.max_body_bytes)

    @property
    def key_limits(self) -> Limits:
        """Limits of keys that have none of their own."""
        return Limits(self.key_requests_per_minute, self.key_tokens_per_minute, self.key_concurrent_requests)

    @field_validator("cors_allow_origins")
    @classmethod
    def _exact_origins(cls, value: str) -> str:
        for origin in _entries(value):
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin[:80]!r} is no origin: give scheme, host and port as a browser sends them, like "
                    "https://chat.example.com (no path, no capitals; '*' is not possible)"
                )
        return value

    @field_validator("webhook_secret")
    @classmethod
    def _keys(cls, secret: SecretStr) -> SecretStr:
        for one in secret.get_secret_value().split():
            if len(signing_key(one)) < 16:
                raise ValueError("must have at least 16 characters, or bytes behind whsec_")
        return secret

    @field_validator("webhook_urls", "webhook_allow")
    @classmethod
    def _plain_urls(cls, value: str) -> str:
        for entry in _entries(value):
            webhook_parts(entry)
        return value

    @field_validator("adapters_s3")
    @classmethod
    def _prefixes(cls, value: str) -> str:
        for entry in _entries(value):
            if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/[^/]+)*/?", entry):
                raise ValueError(f"{entry[:80]!r} is no prefix: give them like s3://bucket/adapters")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: str) -> str:
        for entry in _entries(value):
            try:
                ipaddress.ip_network(entry)
            except ValueError as error:
                raise ValueError(
                    f"{entry[:80]!r} is no address or network of a proxy ({error}): give them like 10.0.0.0/8, and not "
                    "as '*', which would believe every client"
                ) from error
        return value


def _entries(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
