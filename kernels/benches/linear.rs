//! Rates of linear layers beside the machine's own limits.
//!
//! `cargo bench -p rung-kernels --bench linear -- threads=2 isa=avx512 format=Q4_1 input=int8
//! rows=1,16,128`; every setting has a default. Shapes are those of a model of 135 million weights;
//! each is there as often as it takes to come from memory rather than from a cache.

use std::error::Error;
use std::io::{Write, stdout};
use std::time::{Duration, Instant};

use rung_kernels::cpu::isa::Isa;
use rung_kernels::cpu::limits::{self, Limits};
use rung_kernels::cpu::linear::{Context, Input, LinearError, Output, PackedLinear, Projection, project};
use rung_kernels::cpu::pool::{Pool, default_num_threads};
use rung_kernels::cpu::quantize::QuantizedRows;
use rung_kernels::dequantize::Format;

/// Outputs and inputs.
const SHAPES: [(usize, usize); 4] = [(576, 576), (1536, 576), (576, 1536), (49152, 576)];
/// Bytes of weights that are gone through.
const TOTAL_BYTES: usize = 64 << 20;
/// Each time is the best of so many runs.
const NUM_RUNS: usize = 10;
/// A run goes through so many rows at least, or through all weights.
const RUN_ROWS: usize = 2048;

struct Settings {
    num_threads: usize,
    isa: Isa,
    format: Format,
    is_float: bool,
    rows: Vec<usize>,
}

impl Settings {
    fn from_arguments() -> Result<Self, Box<dyn Error>> {
        let mut settings = Self {
            num_threads: default_num_threads(),
            isa: Isa::best(),
            format: Format::Q4_1,
            is_float: false,
            rows: vec![1, 8, 16, 32, 128],
        };
        // Cargo adds a `--bench`.
        for argument in std::env::args().skip(1).filter(|argument| !argument.starts_with("--")) {
            match argument.split_once('=') {
                Some(("threads", value)) => settings.num_threads = value.parse()?,
                Some(("isa", value)) => settings.isa = Isa::from_name(value)?,
                Some(("format", value)) => settings.format = Format::from_name(value)?,
                Some(("input", value @ ("int8" | "float"))) => settings.is_float = value == "float",
                Some(("rows", value)) => {
                    settings.rows = value.split(',').map(str::parse).collect::<Result<_, _>>()?;
                }
                _ => return Err(format!("unknown setting {argument:?}; see the head of this file").into()),
            }
        }
        Ok(settings)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let settings = Settings::from_arguments()?;
    let pool = Pool::new(settings.num_threads)?;
    let limits = limits::measure(&pool, settings.isa)?;
    let mut out = stdout().lock();
    writeln!(
        out,
        "{} threads, {}: memory {:.1} GB/s, int8 {:.0} GOP/s, float32 {:.0} GFLOP/s",
        settings.num_threads, settings.isa, limits.read_gb_s, limits.int8_gop_s, limits.f32_gflop_s
    )?;
    writeln!(out, "of memory: packed weights per second; of ops: products per second; each of its limit")?;
    for shape in SHAPES {
        let weights = weights(&settings, &pool, shape)?;
        for &num_rows in &settings.rows {
            let ctx = Context { pool: &pool, isa: settings.isa };
            let seconds = time(ctx, &weights, num_rows, settings.is_float)?.as_secs_f64();
            writeln!(out, "{}", report(&settings, &limits, &weights[0], num_rows, seconds))?;
        }
    }
    Ok(())
}

/// As many matrices of one shape as make `TOTAL_BYTES`.
fn weights(
    settings: &Settings,
    pool: &Pool,
    (num_outputs, num_inputs): (usize, usize),
) -> Result<Vec<PackedLinear>, Box<dyn Error>> {
    let num_bytes = settings.format.row_bytes(num_inputs)? * num_outputs;
    // No pattern of these bytes is an infinity or a NaN in any format.
    let data: Vec<u8> = (0..num_bytes).map(|i| (i * 31 % 61) as u8).collect();
    let num_copies = (TOTAL_BYTES / num_bytes).max(1);
    (0..num_copies)
        .map(|_| Ok(PackedLinear::pack(settings.format, &data, num_outputs, num_inputs, pool)?))
        .collect()
}

/// Of one product.
fn time(
    ctx: Context<'_>,
    weights: &[PackedLinear],
    num_rows: usize,
    is_float: bool,
) -> Result<Duration, LinearError> {
    let (num_outputs, num_inputs) = (weights[0].num_outputs(), weights[0].num_inputs());
    let x: Vec<f32> = (0..num_rows * num_inputs).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
    let mut quantized = QuantizedRows::zeros(num_rows, num_inputs);
    quantized.quantize(ctx.isa, ctx.pool, &x).map_err(LinearError::Pool)?;
    let input = if is_float { Input::Float(&x) } else { Input::Quantized(&quantized) };
    let mut out = vec![0.0; num_rows * num_outputs];
    let num_products = RUN_ROWS.div_ceil(num_rows.max(1)).min(weights.len());
    let mut best = Duration::MAX;
    let mut next = weights.iter().cycle();
    for _ in 0..NUM_RUNS {
        let start = Instant::now();
        for weight in next.by_ref().take(num_products) {
            let output = Output::Store(&mut out);
            project(ctx, input, num_rows, &mut [Projection { weight, output }])?;
        }
        best = best.min(start.elapsed());
    }
    Ok(best / num_products as u32)
}

fn report(
    settings: &Settings,
    limits: &Limits,
    weight: &PackedLinear,
    num_rows: usize,
    seconds: f64,
) -> String {
    let (num_outputs, num_inputs) = (weight.num_outputs(), weight.num_inputs());
    let ops = (2 * num_rows * num_outputs * num_inputs) as f64;
    let op_limit = if settings.is_float { limits.f32_gflop_s } else { limits.int8_gop_s };
    format!(
        "{:5} {num_outputs:5} x {num_inputs:<5} {num_rows:4} rows {:8.1} us  {:3.0}% of memory  {:3.0}% of ops",
        settings.format.name(),
        seconds * 1e6,
        weight.num_bytes() as f64 / seconds / 1e9 / limits.read_gb_s * 100.0,
        ops / seconds / 1e9 / op_limit * 100.0
    )
}
