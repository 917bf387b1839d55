"""Examples in the help of each command: one that works as it stands, or with names of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "up": ("up", "up --model Qwen/Qwen3.5-4B --device cuda", "up --host 0.0.0.0 --port 8000"),
    "serve": ("serve", "serve gateway --host 0.0.0.0", "serve engine --model /models/qwen3.5-4b"),
    "ps": ("ps", "ps --url https://temper.example.com"),
    "logs": (
        "logs",
        "logs engine --follow",
        "logs gateway --lines 200",
        "logs --url https://temper.example.com --level warning --follow",
    ),
    "doctor": ("doctor", "doctor --fix", "doctor --model /models/qwen3.5-4b --url https://temper.example.com --json"),
    "bench": (
        "bench --concurrency 16 --prompt-tokens 512 --max-tokens 128",
        "bench --rate 4 --requests 240 --prompt-tokens 128-2048 --plot load.png",
        "bench --chat --url https://temper.example.com --json",
    ),
    "pull": ("pull Qwen/Qwen3.5-4B", "pull s3://models/qwen3.5-4b --directory /models/qwen3.5-4b"),
    "tune": ("tune --model /models/qwen3.5-4b --quantization fp8",),
    "engine list": ("engine list",),
    "engine sleep": ("engine sleep", "engine sleep --engine engine-0 --no-wait"),
    "engine wake": ("engine wake --timeout 120",),
    "kernels pack": ("kernels pack /opt/temper/kernels --card sm90",),
    "chat": ("chat", "chat 'What is 3 + 4?' --adapter polite@3", "chat - --no-think", "chat --store"),
    "agent": ("agent", "agent --workspace ."),
    "run": ("run --prompt 'Which file is the longest?' --workspace . --json",),
    "demo": ("demo --rounds 3", "demo --loop --seed 2"),
    "version": ("version --json",),
    "train submit": (
        "train submit sft --data examples.jsonl --adapter polite --wait",
        "train submit sft --data examples.jsonl --adapter polite --dry-run",
        "train submit kto --dataset thumbs --adapter polite --no-attach",
        "train submit job.json --set learning_rate=1e-4",
    ),
    "train replay": ("train replay polite@3 --data examples.jsonl", "train replay receipt.json"),
    "train status": ("train status", "train status JOB"),
    "train watch": ("train watch JOB --timeout 3600",),
    "train cancel": ("train cancel JOB",),
    "webhooks list": ("webhooks list", "webhooks list --state failed"),
    "webhooks show": ("webhooks show whd_1764417600000_0_9f86d081",),
    "webhooks resend": ("webhooks resend whd_1764417600000_0_9f86d081",),
    "train pause": ("train pause JOB",),
    "train resume": ("train resume JOB",),
    "environments serve": ("environments serve guess", "environments serve calculator --port 8431 --sessions 64"),
    "feedback give": (
        "feedback give chatcmpl-5f2d3babebe94537a14147bcd83c3b15 --down",
        "feedback give chatcmpl-5f2d3babebe94537a14147bcd83c3b15 --correct 'Good day!' --user u-17",
        "feedback give chatcmpl-5f2d3babebe94537a14147bcd83c3b15 chatcmpl-9d0c2f7be1a84b62b0c6a1a8e8a6d713 --score 0.5",
    ),
    "feedback list": ("feedback list",),
    "feedback delete": ("feedback delete fb_01jd3vkk2zq8x6m4n7c5r9t1wp",),
    "dataset create": (
        "dataset create thumbs",
        "dataset create support --dry-run --set filter.min_rating=0.5 --set split.by=session",
    ),
    "dataset list": ("dataset list", "dataset list thumbs"),
    "dataset show": ("dataset show thumbs", "dataset show thumbs@2 --split held_out"),
    "dataset examples": (
        "dataset examples thumbs sft train.jsonl",
        "dataset examples thumbs@1 kto held.jsonl --split held_out",
    ),
    "dataset delete": ("dataset delete thumbs@1",),
    "canary start": (
        "canary start polite@4 --share 0.1 --gain 0.05",
        "canary start polite@4 --set guardrails.length=null --set max_seconds=86400",
    ),
    "canary list": ("canary list", "canary list --state promoted --adapter polite"),
    "canary show": ("canary show canary_01jd3vkk2zq8x6m4n7c5r9t1wp",),
    "canary decide": (
        "canary decide canary_01jd3vkk2zq8x6m4n7c5r9t1wp roll_back --reason 'too terse'",
        "canary decide canary_01jd3vkk2zq8x6m4n7c5r9t1wp promote",
    ),
    "learner apply": ("learner apply support.yaml", "learner apply support.yaml --set trigger.min_rows=50"),
    "learner list": ("learner list",),
    "learner show": ("learner show support",),
    "learner events": ("learner events support --limit 50", "learner events support --json"),
    "learner plan": ("learner plan support",),
    "learner pause": ("learner pause support",),
    "learner resume": ("learner resume support",),
    "learner run": ("learner run support",),
    "learner delete": ("learner delete support",),
    "feedback export": ("feedback export kto rated.jsonl",),
    "eval run": ("eval run sums dates@2 --target base --target polite@3 --wait",),
    "eval show": ("eval show EVALUATION",),
    "eval list": ("eval list --adapter polite",),
    "eval compare": ("eval compare EVALUATION --plot scores.png",),
    "eval contamination": ("eval contamination sums polite@3",),
    "eval export": ("eval export EVALUATION results",),
    "eval import": ("eval import results_2026-01-31.json",),
    "eval suites create": (
        "eval suites create sums sums.jsonl --scorer exact",
        "eval suites create gsm8k test.jsonl --format gsm8k",
        "eval suites create held-out --dataset thumbs --scorer perplexity",
    ),
    "eval suites create-shipped": ("eval suites create-shipped",),
    "eval suites list": ("eval suites list",),
    "eval suites show": ("eval suites show sums@2",),
    "eval suites items": ("eval suites items sums --limit 20",),
    "eval suites delete": ("eval suites delete sums@1",),
    "forge run": ("forge run recipe.yaml --dry-run",),
    "forge submit": ("forge submit recipe.yaml --wait",),
    "forge delete": ("forge delete RUN",),
    "forge list": ("forge list",),
    "forge show": ("forge show RUN",),
    "forge evaluate": ("forge evaluate SMALLER --suite suites --baseline MODEL",),
    "forge importance": ("forge importance MODEL scores.safetensors --method activations --data texts.jsonl",),
    "forge prune": ("forge prune MODEL scores.safetensors cut --layers 4",),
    "forge compact": ("forge compact MODEL cut SMALLER",),
    "forge recover": ("forge recover SMALLER RECOVERED --data texts.jsonl --teacher MODEL",),
    "forge quantize": ("forge quantize RECOVERED FP8",),
    "forge verify": ("forge verify FP8 --key public.pem",),
    "batch submit": ("batch submit requests.jsonl --wait --output answers.jsonl",),
    "batch status": ("batch status", "batch status BATCH"),
    "batch cancel": ("batch cancel BATCH",),
    "sessions list": ("sessions list",),
    "sessions show": ("sessions show support-42",),
    "sessions save": ("sessions save support-42",),
    "sessions export": ("sessions export support-42 session.bin",),
    "sessions import": ("sessions import session.bin support-42",),
    "sessions delete": ("sessions delete support-42",),
    "adapters list": ("adapters list",),
    "adapters show": ("adapters show polite",),
    "adapters attach": ("adapters attach polite@3",),
    "adapters detach": ("adapters detach",),
    "adapters upload": ("adapters upload ./adapter --name polite --attach",),
    "adapters download": ("adapters download polite@3 ./adapter",),
    "adapters receipt": ("adapters receipt polite@3", "adapters receipt polite@3 --verify receipts.pub.pem"),
    "adapters verify": ("adapters verify polite@3", "adapters verify polite@3 --max-kl 0.5 --min-agreement 0.6"),
    "adapters rollback": ("adapters rollback", "adapters rollback polite --to 2"),
    "adapters prune": ("adapters prune polite --keep 5 --dry-run",),
    "adapters merge": ("adapters merge both --from polite@3:0.6 --from brief@1:0.4 --wait",),
    "adapters extract": ("adapters extract polite@3 MERGED --base MODEL",),
    "adapters convert": ("adapters convert polite@3 OUT --to multimodal",),
    "keys create": ("keys create --file keys.json --name ci --scopes inference,train --expires-days 90",),
    "keys list": ("keys list --file keys.json",),
    "keys revoke": ("keys revoke k-5e0c6f1ab2d3 --file keys.json",),
    "config show": ("config show", "config show --all --json"),
    "config check": ("config check",),
    "context add": (
        "context add production https://temper.example.com --key-file key.txt",
        "context add laptop http://localhost:8420",
    ),
    "context use": ("context use production",),
    "context remove": ("context remove laptop",),
    "context list": ("context list",),
}


def leaves(app: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Commands of a typer application with their whole names."""
    for command in app.registered_commands:
        own = command.name or command.callback.__name__.replace("_", "-")
        yield f"{name} {own}".strip(), command
    for group in app.registered_groups:
        own = group.name or group.typer_instance.info.name
        yield from leaves(group.typer_instance, f"{name} {own}".strip())


def add_examples(app: Any) -> None:
    """Puts each command's examples below its help."""
    for name, command in leaves(app):
        if name in EXAMPLES:
            command.epilog = "\n\n".join(["Examples:", *(f"temper {example}" for example in EXAMPLES[name])])
