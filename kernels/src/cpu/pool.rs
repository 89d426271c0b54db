//! Worker threads that share the numbered units of one piece of work at a time.
//!
//! Units are claimed one by one, so who computes a unit is open; what it computes is not. A
//! worker spins shortly for more work, then sleeps: an idle pool takes no processor time.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread looks for work, or for the end of it, before it sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// Looks between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 32;
/// More threads than this are refused: a typing error, not a machine.
const MAX_THREADS: usize = 1024;
const REMAINING: u64 = 0xFFFF_FFFF;

/// What went wrong in the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolError {
    /// The number of threads is out of range.
    NumThreads(usize),
    /// The system refused a thread.
    Spawn(String),
    /// More units than can be counted.
    NumUnits(usize),
    /// A unit panicked; the first message.
    Panicked(String),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NumThreads(num) => write!(f, "{num} threads asked for; give between 1 and {MAX_THREADS}"),
            Self::Spawn(error) => write!(f, "cannot start a worker thread: {error}"),
            Self::NumUnits(num) => write!(f, "{num} work units at once; at most {REMAINING}"),
            Self::Panicked(message) => write!(f, "a kernel failed: {message}"),
        }
    }
}

impl std::error::Error for PoolError {}

/// Threads that the control group's quota and the affinity mask leave to this process.
pub fn default_num_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A piece of work as the workers see it; valid until its last unit is done.
#[derive(Clone, Copy)]
struct Job {
    work: *const Work<'static>,
    num_units: u32,
}

struct Shared {
    /// Upper half: which job; lower half: units not yet claimed.
    claims: AtomicU64,
    /// Units of the job not yet done.
    unfinished: AtomicUsize,
    /// Written by the caller while nothing is left to claim, read after a claim.
    job: job_cell::JobCell,
    /// Threads that sleep on `wake`.
    num_sleeping: AtomicUsize,
    stop: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
    /// The caller sleeps on this for the last unit.
    caller_sleeping: AtomicBool,
    done: Condvar,
    panic: Mutex<Option<String>>,
}

/// Threads for units of work. The calling thread takes part.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One piece of work at a time.
    caller: Mutex<()>,
}

impl Pool {
    /// A pool of `num_threads`, the caller of `run` included.
    pub fn new(num_threads: usize) -> Result<Self, PoolError> {
        if !(1..=MAX_THREADS).contains(&num_threads) {
            return Err(PoolError::NumThreads(num_threads));
        }
        let shared = Arc::new(Shared {
            claims: AtomicU64::new(0),
            unfinished: AtomicUsize::new(0),
            job: job_cell::JobCell::new(),
            num_sleeping: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            caller_sleeping: AtomicBool::new(false),
            done: Condvar::new(),
            panic: Mutex::new(None),
        });
        let mut pool = Self { shared, workers: Vec::new(), caller: Mutex::new(()) };
        for worker in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            let handle = std::thread::Builder::new()
                .name(format!("rung-cpu-{worker}"))
                .spawn(move || shared.work_until_stopped(worker))
                .map_err(|error| PoolError::Spawn(error.to_string()))?;
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    /// Threads, the caller's included.
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Call `work(unit, worker)` once for each unit in `0..num_units`, on any worker in
    /// `0..num_threads`, and return when all are done. A worker runs one unit at a time; a unit
    /// must not call `run` of the same pool.
    pub fn run(&self, num_units: usize, work: impl Fn(usize, usize) + Sync) -> Result<(), PoolError> {
        let count = u32::try_from(num_units).map_err(|_| PoolError::NumUnits(num_units))?;
        let _one_at_a_time = lock(&self.caller);
        if count <= 1 || self.workers.is_empty() {
            for unit in 0..num_units {
                self.shared.run_unit(&work, unit, 0);
            }
        } else {
            self.shared.run_job(&work, count);
        }
        match lock(&self.shared.panic).take() {
            Some(message) => Err(PoolError::Panicked(message)),
            None => Ok(()),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.sleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches every panic, so there is nothing to hear.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("num_threads", &self.num_threads()).finish_non_exhaustive()
    }
}

impl Shared {
    fn run_job(&self, work: &Work<'_>, num_units: u32) {
        self.unfinished.store(num_units as usize, Ordering::Relaxed);
        self.job.set(work, num_units);
        let job_number = (self.claims.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        let claims = (job_number << 32) | u64::from(num_units);
        // Sequentially consistent against `num_sleeping`: either the sleeper sees the claims or
        // we see the sleeper.
        self.claims.store(claims, Ordering::SeqCst);
        if self.num_sleeping.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.sleep));
            self.wake.notify_all();
        }
        while self.claim_and_run(0) {}
        self.wait_until_done();
    }

    /// Claim a unit of the current job and run it; false if none is left.
    fn claim_and_run(&self, worker: usize) -> bool {
        let mut claims = self.claims.load(Ordering::Acquire);
        loop {
            if claims & REMAINING == 0 {
                return false;
            }
            match self.claims.compare_exchange_weak(claims, claims - 1, Ordering::Acquire, Ordering::Acquire)
            {
                Ok(_) => break,
                Err(current) => claims = current,
            }
        }
        self.job.with_claimed(|work, num_units| {
            let unit = num_units as usize - (claims & REMAINING) as usize;
            self.run_unit(work, unit, worker);
        });
        if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1 && self.caller_sleeping.load(Ordering::SeqCst)
        {
            drop(lock(&self.sleep));
            self.done.notify_all();
        }
        true
    }

    fn run_unit(&self, work: &Work<'_>, unit: usize, worker: usize) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(unit, worker))) {
            lock(&self.panic).get_or_insert_with(|| panic_message(&*payload));
        }
    }

    fn wait_until_done(&self) {
        let is_done = || self.unfinished.load(Ordering::SeqCst) == 0;
        if spin_until(is_done) {
            return;
        }
        self.caller_sleeping.store(true, Ordering::SeqCst);
        let mut guard = lock(&self.sleep);
        while !is_done() {
            guard = self.done.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeping.store(false, Ordering::SeqCst);
    }

    fn work_until_stopped(&self, worker: usize) {
        let has_news =
            || self.claims.load(Ordering::SeqCst) & REMAINING != 0 || self.stop.load(Ordering::SeqCst);
        while !self.stop.load(Ordering::SeqCst) {
            while self.claim_and_run(worker) {}
            if spin_until(has_news) {
                continue;
            }
            let mut guard = lock(&self.sleep);
            self.num_sleeping.fetch_add(1, Ordering::SeqCst);
            while !has_news() {
                guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.num_sleeping.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Look until `condition` holds, for at most `SPIN`; whether it does.
fn spin_until(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS_PER_CLOCK {
            if condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

/// No lock here guards data that a panic could leave half-written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

mod job_cell {
    #![expect(unsafe_code, reason = "lends a closure to other threads until its units are done")]

    use std::cell::UnsafeCell;

    use super::{Job, Work};

    pub(super) struct JobCell(UnsafeCell<Option<Job>>);

    // SAFETY: `set` and `with_claimed` never overlap, as their comments say, and the closure
    // itself is `Sync`.
    unsafe impl Sync for JobCell {}
    // SAFETY: as above.
    unsafe impl Send for JobCell {}

    impl JobCell {
        pub(super) fn new() -> Self {
            Self(UnsafeCell::new(None))
        }

        /// Called by the one caller before it publishes claims: nothing is left to claim, and
        /// every claimed unit of the job before is done, so nobody reads.
        #[expect(clippy::transmute_ptr_to_ptr, reason = "a cast cannot lengthen a lifetime")]
        pub(super) fn set(&self, work: &Work<'_>, num_units: u32) {
            let work: *const Work<'_> = work;
            // SAFETY: only the lifetime changes; the caller keeps `work` until all units are
            // done, and nobody reads it later. Nobody reads the cell now (see above).
            unsafe {
                let work = std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work);
                *self.0.get() = Some(Job { work, num_units });
            }
        }

        /// Called with a claimed unit that is not yet counted as done: the caller waits for it,
        /// so the cell and the closure stay as they are.
        pub(super) fn with_claimed(&self, run: impl FnOnce(&Work<'_>, u32)) {
            // SAFETY: see above.
            unsafe {
                if let Some(job) = *self.0.get() {
                    run(&*job.work, job.num_units);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_runs_once() {
        for num_threads in [1, 2, 3, 8] {
            let pool = Pool::new(num_threads).unwrap();
            for num_units in [0, 1, 2, 7, 100, 1000] {
                let counts: Vec<AtomicUsize> = (0..num_units).map(|_| AtomicUsize::new(0)).collect();
                pool.run(num_units, |unit, worker| {
                    assert!(worker < num_threads);
                    counts[unit].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                for count in &counts {
                    assert_eq!(count.load(Ordering::Relaxed), 1);
                }
            }
        }
    }

    #[test]
    fn many_short_jobs_in_a_row() {
        let pool = Pool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        for round in 0..20_000 {
            pool.run(round % 5, |unit, _| {
                total.fetch_add(unit + 1, Ordering::Relaxed);
            })
            .unwrap();
        }
        // Per five rounds 0 + 1 + 3 + 6 + 10.
        assert_eq!(total.into_inner(), 20_000 / 5 * 20);
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_survives() {
        let pool = Pool::new(2).unwrap();
        let done = AtomicUsize::new(0);
        let result = pool.run(50, |unit, _| {
            assert!(unit != 17, "unit seventeen");
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(result, Err(PoolError::Panicked("unit seventeen".to_owned())));
        assert_eq!(done.load(Ordering::Relaxed), 49);
        pool.run(50, |_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(done.load(Ordering::Relaxed), 99);
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(2).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(10, |_, _| {
                            total.fetch_add(1, Ordering::Relaxed);
                        })
                        .unwrap();
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 15_000);
    }

    #[test]
    fn thread_counts_have_limits() {
        for num_threads in [0, MAX_THREADS + 1] {
            assert_eq!(Pool::new(num_threads).err(), Some(PoolError::NumThreads(num_threads)));
        }
    }
}
