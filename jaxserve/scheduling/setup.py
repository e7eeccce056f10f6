"""From a resolved configuration to a scheduler with its policy, cache and reservation; decides nothing later."""

from jaxserve.clock import Clock
from jaxserve.config import EngineConfig
from jaxserve.request import SamplingParams
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import Request
from jaxserve.scheduling.policies import Batches, Fair, Fcfs, LongestPrefix, Priority
from jaxserve.scheduling.prefix_cache import PrefixCache, RootKey, root_key
from jaxserve.scheduling.reservation import Reservation
from jaxserve.scheduling.restore_rule import RestoreRule
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.simulation.step_times import StepTimes


def build_scheduler(config: EngineConfig, clock: Clock, step_times: StepTimes | None = None) -> Scheduler:
    """Args: step_times: None where nothing is known of them."""
    assert isinstance(config.cache.page_size, int), "the configuration is not resolved"
    assert isinstance(config.cache.num_pages, int)
    assert isinstance(config.execution.block_q, int)
    assert config.execution.prefill_buckets != "auto"
    block_q, section = config.execution.block_q, config.scheduler
    assert isinstance(section.max_num_batched_tokens, int)
    rule = RestoreRule(
        times=step_times,
        page_size=config.cache.page_size,
        block_q=block_q,
        max_prefill_blocks=max(config.execution.prefill_buckets),
    )
    cache = PrefixCache(
        PagePool(config.cache.num_pages),
        page_size=config.cache.page_size,
        host_pages=config.cache.host_pages,
        pays=rule.pays,
        is_enabled=config.cache.prefix_caching,
    )
    threshold = section.long_prefill_token_threshold
    return Scheduler(
        cache,
        build_policy(config, cache),
        Reservation(section.admission),
        page_size=config.cache.page_size,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        block_q=block_q,
        max_prefill_blocks=max(config.execution.prefill_buckets),
        max_chunk_blocks=None if threshold is None else max(1, threshold // block_q),
        max_consecutive_prefills=section.max_consecutive_prefills,
        max_running_per_tenant=section.max_running_per_tenant,
        max_restored_pages=rule.most_restored(),
        max_saved_pages=rule.most_saved(),
        clock=clock,
    )


def build_policy(config: EngineConfig, cache: PrefixCache) -> Fcfs:
    section = config.scheduler

    def cached_pages(request: Request) -> int:
        return len(cache.match(request.root, request.token_ids)) if request.may_skip_cached else 0

    match section.policy:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority(section.ageing_s)
        case "longest-prefix":
            return LongestPrefix(cached_pages)
        case "fair":
            return Fair(section.tenant_weights)
        case "static":
            return Batches(batch_size=section.max_num_seqs, max_delay_s=0.0)
        case "dynamic":
            return Batches(batch_size=section.max_num_seqs, max_delay_s=section.max_queue_delay_ms / 1000)


def cache_root(config: EngineConfig, params: SamplingParams) -> RootKey:
    """What a request's keys and values depend on beside its tokens."""
    return root_key(
        model=config.model.path,
        dtype=config.model.dtype,
        kv_dtype=config.cache.dtype,
        salt=params.cache_salt,
        tenant=params.tenant if config.cache.isolate_tenants else None,
    )
