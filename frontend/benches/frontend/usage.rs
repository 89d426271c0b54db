//! What a process or thread has used so far, from `/proc`.

use std::fs;
use std::ops::Sub;

/// CPU time. The kernel counts it in ticks, of which Linux shows 100 a second everywhere.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cpu {
    pub(crate) user_s: f64,
    pub(crate) kernel_s: f64,
}

const TICKS_PER_S: f64 = 100.0;

impl Cpu {
    /// Of a process, all threads together.
    pub(crate) fn of_process(pid: u32) -> Self {
        Self::read(&format!("/proc/{pid}/stat"))
    }

    /// Of the calling thread.
    pub(crate) fn of_this_thread() -> Self {
        Self::read("/proc/thread-self/stat")
    }

    fn read(path: &str) -> Self {
        let line = fs::read_to_string(path).unwrap();
        // The name before the last parenthesis may hold anything.
        let fields: Vec<&str> = line.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks = |index: usize| fields[index].parse::<f64>().unwrap() / TICKS_PER_S;
        Self { user_s: ticks(11), kernel_s: ticks(12) }
    }

    /// Microseconds per operation, as "user + kernel".
    pub(crate) fn per(self, operations: u64) -> String {
        let each = |seconds: f64| seconds * 1e6 / operations.max(1) as f64;
        format!("{:.1} + {:.1}", each(self.user_s), each(self.kernel_s))
    }
}

impl Sub for Cpu {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self { user_s: self.user_s - earlier.user_s, kernel_s: self.kernel_s - earlier.kernel_s }
    }
}

/// Resident memory of a process, in KiB.
pub(crate) fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
