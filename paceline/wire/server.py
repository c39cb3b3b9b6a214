"""What a server says of itself (model, layout, counters) and of a text's tokens, as messages
(inference.proto).
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.generation import (
    DefaultSpeculation,
    ModelDescription,
    SpeculationStats,
    Stats,
    Tokens,
    Topology,
    TopologyWorker,
    WorkerLife,
    WorkerStats,
)
from paceline.sampling import SamplingParams
from paceline.v1 import inference_pb2, types_pb2
from paceline.wire.fields import read_fields, values_of
from paceline.wire.sequences import STOPPINGS, stopping_from_wire


def description_to_wire(description: ModelDescription) -> inference_pb2.DescribeModelResponse:
    sampling = types_pb2.SamplingParams(**values_of(description.default_sampling))
    values = values_of(description) | {"default_sampling": sampling}
    return inference_pb2.DescribeModelResponse(**values)


def description_from_wire(response: inference_pb2.DescribeModelResponse) -> ModelDescription:
    sampling = read_fields(SamplingParams, response.default_sampling)
    return read_fields(ModelDescription, response, default_sampling=sampling)


def topology_to_wire(topology: Topology) -> inference_pb2.DescribeTopologyResponse:
    default = values_of(topology.default_speculation)
    default["stopping"] = STOPPINGS[default["stopping"]]
    return inference_pb2.DescribeTopologyResponse(
        version=topology.version,
        target_groups=[
            inference_pb2.TargetGroup(shards=_workers_to_wire(shards))
            for shards in topology.target_groups
        ],
        drafters=_workers_to_wire(topology.drafters),
        rules=topology.rules,
        policies=topology.policies,
        default_speculation=inference_pb2.DefaultSpeculation(**default),
    )


def _workers_to_wire(workers: Iterable[TopologyWorker]) -> list[inference_pb2.TopologyWorker]:
    return [inference_pb2.TopologyWorker(**values_of(worker)) for worker in workers]


def topology_from_wire(response: inference_pb2.DescribeTopologyResponse) -> Topology:
    default = response.default_speculation
    stopping = stopping_from_wire(default.stopping).value
    return read_fields(
        Topology,
        response,
        target_groups=tuple(
            tuple(read_fields(TopologyWorker, shard) for shard in group.shards)
            for group in response.target_groups
        ),
        drafters=tuple(read_fields(TopologyWorker, drafter) for drafter in response.drafters),
        default_speculation=read_fields(DefaultSpeculation, default, stopping=stopping),
    )


def stats_to_wire(stats: Stats) -> inference_pb2.StatsResponse:
    nested = {
        "workers": [inference_pb2.WorkerStats(**values_of(one)) for one in stats.workers],
        "speculation": inference_pb2.SpeculationStats(**values_of(stats.speculation)),
        "lives": [inference_pb2.WorkerLife(**values_of(life)) for life in stats.lives],
    }
    return inference_pb2.StatsResponse(**values_of(stats) | nested)


def stats_from_wire(response: inference_pb2.StatsResponse) -> Stats:
    return read_fields(
        Stats,
        response,
        workers=tuple(read_fields(WorkerStats, worker) for worker in response.workers),
        speculation=read_fields(SpeculationStats, response.speculation),
        lives=tuple(read_fields(WorkerLife, life) for life in response.lives),
    )


def tokens_to_wire(tokens: Tokens) -> inference_pb2.TokenizeResponse:
    return inference_pb2.TokenizeResponse(**values_of(tokens))


def tokens_from_wire(response: inference_pb2.TokenizeResponse) -> Tokens:
    return read_fields(Tokens, response)
