"""/v1/eval/suites/{suite}/contamination: what of a suite a version was trained on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from services.common.adapters.names import AdapterRef, AdapterVersion, parse_adapter_ref
from services.common.evaluation.contamination.report import contamination
from services.common.evaluation.contamination.store import TrainingHashes
from services.common.evaluation.suites.names import parse_suite_ref
from services.gateway.api.adapters.routes import Adapters
from services.gateway.api.base.routing import Routes
from services.gateway.api.evaluation.services import Evaluation
from services.gateway.auth.route_permissions import TRAIN_OR_ADMIN, Permission
from services.gateway.protocol.evaluation.contamination import ContaminationObject
from services.gateway.protocol.evaluation.suites import SuitePath

routes = Routes("evaluation")


@routes.get("/v1/eval/suites/{suite}/contamination", Permission(TRAIN_OR_ADMIN))
async def get_contamination(
    suite: SuitePath,
    adapter: AdapterRef,
    evaluation: Evaluation,
    adapters: Adapters,
    limit: Annotated[int, Query(ge=0, le=1000)] = 100,
) -> ContaminationObject:
    """Items of a suite that occur in the training data of a version, `name@n` or the current one of `name`, and of all
    that it came of: as a whole prompt, or with 13 words in a row.

    The data themselves are not needed: every job keeps hashes of its own. Versions of whose training nothing is known
    are listed in `unknown`; the base model's own training is unknown always.
    """
    manifest = await evaluation.threads.run(evaluation.suites.get, *parse_suite_ref(suite))
    name, number = parse_adapter_ref(adapter)
    version = (
        await adapters.threads.run(adapters.registry.current, name) if number is None else AdapterVersion(name, number)
    )
    await adapters.threads.run(adapters.registry.manifest, version)
    async with evaluation.checks:
        found = await evaluation.threads.run(
            contamination, evaluation.suites, TrainingHashes(adapters.registry), manifest, version
        )
    return ContaminationObject.of(manifest, version, found, limit)
