//! Metrics of engines: their last Step as gauges, their totals as counters.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::engine::session::{SessionObserver, StepReport};
use crate::engine::types::EngineStats;

type RealGauge = Gauge<f64, AtomicU64>;

/// Seconds from an engine's Step to its reader: 10 us on an idle machine, more when one is behind.
const BRIDGE_BUCKETS: [f64; 12] =
    [0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.25, 1.0];

/// Which engine a value is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabel {
    engine: String,
}

#[derive(Debug, Default)]
pub(super) struct EngineFamilies {
    up: Family<EngineLabel, Gauge>,
    running: Family<EngineLabel, Gauge>,
    waiting: Family<EngineLabel, Gauge>,
    kv_blocks_used: Family<EngineLabel, Gauge>,
    kv_blocks_total: Family<EngineLabel, Gauge>,
    kv_usage: Family<EngineLabel, RealGauge>,
    step_rows: Family<EngineLabel, Gauge>,
    step_tokens: Family<EngineLabel, Gauge>,
    step_host: Family<EngineLabel, RealGauge>,
    step_device: Family<EngineLabel, RealGauge>,
    preemptions: Family<EngineLabel, Counter>,
    prompt_tokens: Family<EngineLabel, Counter>,
    generation_tokens: Family<EngineLabel, Counter>,
    restarts: Family<EngineLabel, Counter>,
    dropped_rows: Family<EngineLabel, Counter>,
    protocol_faults: Family<EngineLabel, Counter>,
    merged_steps: Family<EngineLabel, Counter>,
    bridge_latency: BridgeLatency,
}

#[derive(Debug)]
struct BridgeLatency(Family<EngineLabel, Histogram>);

impl Default for BridgeLatency {
    fn default() -> Self {
        Self(Family::new_with_constructor(|| Histogram::new(BRIDGE_BUCKETS)))
    }
}

impl EngineFamilies {
    /// Registers everything.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let families = Self::default();
        families.register_gauges(registry);
        families.register_counters(registry);
        registry.register(
            "rung_engine_bridge_latency_seconds",
            "From the engine's clock when it built a Step to ours when it was read, in seconds; engines of this host only",
            families.bridge_latency.0.clone(),
        );
        families
    }

    /// The metrics of one engine.
    pub(super) fn of(&self, name: &str, host: EngineHost) -> EngineMetrics {
        let label = EngineLabel { engine: name.to_owned() };
        let metrics = EngineMetrics {
            up: self.up.get_or_create_owned(&label),
            running: self.running.get_or_create_owned(&label),
            waiting: self.waiting.get_or_create_owned(&label),
            kv_blocks_used: self.kv_blocks_used.get_or_create_owned(&label),
            kv_blocks_total: self.kv_blocks_total.get_or_create_owned(&label),
            kv_usage: self.kv_usage.get_or_create_owned(&label),
            step_rows: self.step_rows.get_or_create_owned(&label),
            step_tokens: self.step_tokens.get_or_create_owned(&label),
            step_host: self.step_host.get_or_create_owned(&label),
            step_device: self.step_device.get_or_create_owned(&label),
            preemptions: self.preemptions.get_or_create_owned(&label),
            prompt_tokens: self.prompt_tokens.get_or_create_owned(&label),
            generation_tokens: self.generation_tokens.get_or_create_owned(&label),
            restarts: self.restarts.get_or_create_owned(&label),
            dropped_rows: self.dropped_rows.get_or_create_owned(&label),
            protocol_faults: self.protocol_faults.get_or_create_owned(&label),
            merged_steps: self.merged_steps.get_or_create_owned(&label),
            bridge_latency: self.bridge_latency.0.get_or_create_owned(&label),
            host,
            last: Mutex::default(),
        };
        metrics.down();
        metrics
    }

    fn register_gauges(&self, registry: &mut Registry) {
        let gauges = [
            ("rung_engine_up", "Whether the engine is connected and takes requests, 1 or 0", &self.up),
            ("rung_engine_running", "Rows that the engine computes now", &self.running),
            ("rung_engine_waiting", "Rows that wait in the engine", &self.waiting),
            ("rung_engine_kv_blocks_used", "KV blocks in use", &self.kv_blocks_used),
            ("rung_engine_kv_blocks_total", "All KV blocks of the engine", &self.kv_blocks_total),
            ("rung_engine_step_rows", "Rows of the last engine step; 0 when idle", &self.step_rows),
            ("rung_engine_step_tokens", "Tokens of the last engine step; 0 when idle", &self.step_tokens),
            (
                "vllm:num_requests_running",
                "As rung_engine_running, under the name that autoscalers know",
                &self.running,
            ),
            (
                "vllm:num_requests_waiting",
                "As rung_engine_waiting, under the name that autoscalers know",
                &self.waiting,
            ),
        ];
        for (name, help, family) in gauges {
            registry.register(name, help, family.clone());
        }
        let real_gauges = [
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", &self.kv_usage),
            (
                "rung_engine_step_host_seconds",
                "Scheduling, preparation and commit of the last step, in seconds; 0 when idle",
                &self.step_host,
            ),
            (
                "rung_engine_step_device_seconds",
                "Forward pass and sampling of the last step, in seconds; 0 when idle",
                &self.step_device,
            ),
        ];
        for (name, help, family) in real_gauges {
            registry.register(name, help, family.clone());
        }
    }

    fn register_counters(&self, registry: &mut Registry) {
        let counters = [
            ("rung_engine_preemptions", "Rows that were preempted and recomputed", &self.preemptions),
            ("rung_engine_prompt_tokens", "Prompt tokens computed", &self.prompt_tokens),
            ("rung_engine_generation_tokens", "Tokens generated", &self.generation_tokens),
            (
                "rung_engine_restarts",
                "Times that the engine was lost and started or connected again",
                &self.restarts,
            ),
            (
                "rung_engine_dropped_rows",
                "Rows received for requests that nobody waits for",
                &self.dropped_rows,
            ),
            (
                "rung_engine_protocol_faults",
                "Requests ended because the engine broke the protocol",
                &self.protocol_faults,
            ),
            (
                "rung_engine_merged_steps",
                "Engine steps that arrived merged into a later one",
                &self.merged_steps,
            ),
        ];
        for (name, help, family) in counters {
            registry.register(name, help, family.clone());
        }
    }
}

/// Where an engine runs, seen from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineHost {
    /// On this host: its clock is ours.
    This,
    /// Elsewhere.
    Other,
}

/// The metrics of one engine, kept over its restarts.
#[derive(Debug)]
pub struct EngineMetrics {
    up: Gauge,
    running: Gauge,
    waiting: Gauge,
    kv_blocks_used: Gauge,
    kv_blocks_total: Gauge,
    kv_usage: RealGauge,
    step_rows: Gauge,
    step_tokens: Gauge,
    step_host: RealGauge,
    step_device: RealGauge,
    preemptions: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    restarts: Counter,
    dropped_rows: Counter,
    protocol_faults: Counter,
    merged_steps: Counter,
    bridge_latency: Histogram,
    host: EngineHost,
    /// What the engine last reported, to turn its totals into increments.
    last: Mutex<LastReport>,
}

#[derive(Debug, Default)]
struct LastReport {
    stats: EngineStats,
    loop_seq: u64,
}

impl EngineMetrics {
    /// The engine is connected and takes requests.
    pub fn up(&self) {
        self.up.set(1);
    }

    /// The engine is gone; what it did is over.
    pub fn down(&self) {
        self.up.set(0);
        self.set_state(&EngineStats::default());
    }

    /// The engine is about to be started or connected anew.
    pub fn restarted(&self) {
        self.restarts.inc();
    }

    fn set_state(&self, stats: &EngineStats) {
        self.running.set(i64::from(stats.running));
        self.waiting.set(i64::from(stats.waiting));
        self.kv_blocks_used.set(i64::from(stats.kv_blocks_used));
        self.kv_blocks_total.set(i64::from(stats.kv_blocks_total));
        self.kv_usage.set(f64::from(stats.kv_blocks_used) / f64::from(stats.kv_blocks_total.max(1)));
        let is_idle = stats.running == 0 && stats.waiting == 0;
        let step = if is_idle { EngineStats::default() } else { *stats };
        self.step_rows.set(i64::from(step.step_rows));
        self.step_tokens.set(i64::from(step.step_tokens));
        self.step_host.set(Duration::from_nanos(step.step_host_ns).as_secs_f64());
        self.step_device.set(Duration::from_nanos(step.step_device_ns).as_secs_f64());
    }

    fn add_totals(&self, report: &StepReport) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = &report.stats;
        self.preemptions.inc_by(increment(last.stats.preemptions_total, now.preemptions_total));
        self.prompt_tokens.inc_by(increment(last.stats.prompt_tokens_total, now.prompt_tokens_total));
        self.generation_tokens
            .inc_by(increment(last.stats.generation_tokens_total, now.generation_tokens_total));
        // The first Step of a session says nothing about steps before it.
        if report.seq > 1 {
            self.merged_steps.inc_by(report.loop_seq.saturating_sub(last.loop_seq).saturating_sub(1));
        }
        *last = LastReport { stats: *now, loop_seq: report.loop_seq };
    }
}

/// How far a total has grown; one that fell began anew at zero.
fn increment(before: u64, now: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

impl SessionObserver for EngineMetrics {
    fn step(&self, report: &StepReport, dropped_rows: u64, faults: u64) {
        self.set_state(&report.stats);
        self.add_totals(report);
        self.dropped(dropped_rows);
        self.protocol_faults.inc_by(faults);
        if self.host == EngineHost::This
            && let Ok(now) = SystemTime::now().duration_since(UNIX_EPOCH)
        {
            let emitted = Duration::from_nanos(report.emitted_unix_ns);
            self.bridge_latency.observe(now.saturating_sub(emitted).as_secs_f64());
        }
    }

    fn dropped(&self, rows: u64) {
        self.dropped_rows.inc_by(rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    fn value(metrics: &Metrics, name: &str) -> String {
        let text = metrics.render("tiny");
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
        line.rsplit(' ').next().unwrap().trim_end_matches(".0").to_owned()
    }

    fn report(seq: u64, generation_tokens_total: u64) -> StepReport {
        let stats = EngineStats {
            running: 2,
            kv_blocks_used: 1,
            kv_blocks_total: 4,
            generation_tokens_total,
            ..Default::default()
        };
        StepReport { seq, loop_seq: seq * 3, stats, ..Default::default() }
    }

    #[test]
    fn totals_grow_over_a_restart_of_the_engine() {
        let metrics = Metrics::default();
        let engine = metrics.engine("local", EngineHost::Other);
        for total in [5, 9, 2] {
            engine.step(&report(1, total), 0, 0);
        }
        assert_eq!(value(&metrics, "rung_engine_generation_tokens_total"), "11");
    }

    #[test]
    fn gauges_are_idle_again_once_the_engine_is_down() {
        let metrics = Metrics::default();
        let engine = metrics.engine("local", EngineHost::This);
        engine.up();
        engine.step(&report(1, 0), 1, 2);
        engine.step(&report(2, 0), 0, 0);
        assert_eq!(value(&metrics, "rung_engine_up"), "1");
        assert_eq!(value(&metrics, "vllm:num_requests_running"), "2");
        assert_eq!(value(&metrics, "vllm:kv_cache_usage_perc"), "0.25");
        assert_eq!(value(&metrics, "rung_engine_merged_steps_total"), "2");
        assert_eq!(value(&metrics, "rung_engine_protocol_faults_total"), "2");
        assert_eq!(value(&metrics, "rung_engine_bridge_latency_seconds_count"), "2");
        engine.down();
        for name in [
            "rung_engine_up",
            "rung_engine_running",
            "rung_engine_kv_blocks_used",
            "vllm:kv_cache_usage_perc",
        ] {
            assert_eq!(value(&metrics, name), "0", "{name}");
        }
    }
}
