"""`octavo bench simulate`: hours of a house's load in seconds, by the scheduler and the cache as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from octavo.bench.simulated_workloads import WORKLOADS, SimulatedWorkload
from octavo.bench.simulation import Simulation
from octavo.bench.simulation_report import SimulationReport, report_of
from octavo.bench.step_costs import SMOLLM2_TWO_CORES, StepCosts
from octavo.kv.kv_cache import KVCache
from octavo.scheduler.limits import SchedulerConfig, SchedulingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """What is simulated. num_users: one simulation for each; None: the workload's own number.

    minutes: simulated, in which users ask. rate: requests a second of each user who is not backlogged.
    pool_tokens: of keys and values, whole blocks of them. speed: how many times as fast as the machine of
    `SMOLLM2_TWO_CORES`. noise, stalls: as in `StepCosts`. audits: prove the books after every step.

    Raises: ValueError naming what is wrong, the limits of `SchedulerConfig` and `StepCosts` included.
    """

    workload: SimulatedWorkload = WORKLOADS["home"]
    num_users: tuple[int, ...] | None = None
    minutes: float = 60.0
    rate: float | None = None
    weights: tuple[float, ...] = (1.0,)
    seed: int = 0
    pool_tokens: int = 32_768
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_model_len: int = 8_192
    scheduling_policy: str = SchedulingPolicy.FAIR
    target_itl_ms: float | None = None
    speed: float = 1.0
    noise: float = 0.0
    stalls: float = 0.0
    enable_prefix_caching: bool = True
    audits: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.minutes <= 100_000.0:
            raise ValueError(f"{self.minutes} minutes cannot be simulated: more than 0, at most 100,000")
        if self.pool_tokens < 2 * self.block_size:
            raise ValueError(
                f"a pool of {self.pool_tokens} tokens is less than two blocks of {self.block_size}"
            )
        self.config()
        self.costs()

    def config(self) -> SchedulerConfig:
        """The scheduler's limits."""
        return SchedulerConfig(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            SchedulingPolicy(self.scheduling_policy),
            self.target_itl_ms / 1000 if self.target_itl_ms is not None else None,
        )

    def costs(self) -> StepCosts:
        """The machine."""
        usual = SMOLLM2_TWO_CORES.faster(self.speed)
        return StepCosts(
            usual.base, usual.per_token, usual.per_attended, usual.per_pair, self.noise, self.stalls
        )


def simulate(plan: SimulationPlan, say: Callable[[str], None] = lambda _: None) -> Iterator[SimulationReport]:
    """One report for each number of users, in order. Raises: ValueError for a workload that cannot be."""
    for count in plan.num_users or (plan.workload.num_users,):
        say(f"{plan.workload.name} with {count:,} users")
        cache = KVCache(
            plan.pool_tokens // plan.block_size,
            plan.block_size,
            enable_prefix_caching=plan.enable_prefix_caching,
        )
        clients = plan.workload.clients(
            limit=min(plan.max_model_len, cache.capacity_tokens) - 1,
            seed=plan.seed,
            num_users=count,
            rate=plan.rate,
            weights=plan.weights,
        )
        simulation = Simulation(
            clients,
            cache,
            plan.config(),
            plan.costs(),
            until=60.0 * plan.minutes,
            drains=plan.workload.drains,
            seed=plan.seed,
            audits=plan.audits,
        )
        yield report_of(
            simulation.run(),
            workload=plan.workload,
            seed=plan.seed,
            capacity_tokens=cache.capacity_tokens,
        )
