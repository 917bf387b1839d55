"""lm-evaluation-harness with local tasks: answers by chat, answers and likelihoods by completion. Prints a JSON object
of each task's first metric and of a table of ours.json, and writes the harness's own result files."""

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

url, name, directory = sys.argv[1:]
here = Path(directory)
tokenizer = str(here / "tokenizer")


def task(task_name: str, file: str, **config: object) -> dict:
    """A task over lines of JSON, with nothing to fetch."""
    return {
        "task": task_name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(here / file)}},
        "test_split": "test",
        **config,
    }


ANSWERS = {
    "output_type": "generate_until",
    "doc_to_text": "{{messages[0].content}}",
    "doc_to_target": "{{expected}}",
    "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 24, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{prompt}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{choices.index(expected)}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
RUNS = {
    "chat": ("local-chat-completions", "chat/completions", True, task("sums_chat", "arithmetic.jsonl", **ANSWERS)),
    "text": ("local-completions", "completions", True, task("sums_text", "arithmetic.jsonl", **ANSWERS)),
    "choices": ("local-completions", "completions", False, task("choices", "choices.jsonl", **CHOICES)),
}
found = {}
manager = TaskManager(include_defaults=False)  # reading the harness's own thousands of tasks takes half a minute a run
for run, (model, way, chat, config) in RUNS.items():
    tracker = EvaluationTracker(output_path=str(here / run))
    arguments = {"model": name, "base_url": f"{url}/v1/{way}", "num_concurrent": 4, "max_retries": 1}
    if way == "completions":
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": tokenizer}
    results = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[config],
        task_manager=manager,
        apply_chat_template=chat,
        log_samples=True,
        bootstrap_iters=0,
        evaluation_tracker=tracker,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    tracker.save_results_samples(config["task"], samples[config["task"]])
    metric = config["metric_list"][0]["metric"]
    found[run] = {"score": results["results"][config["task"]][f"{metric},none"], "items": len(samples[config["task"]])}
found["table"] = make_table(json.loads((here / "ours.json").read_text()))
print(json.dumps(found))
