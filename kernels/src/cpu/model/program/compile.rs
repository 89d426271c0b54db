//! Turns recorded ops into ops that are ready to run, one at a time.

use super::{Op, OpSpec, Program, ProgramError, ProgramLimits, RegisterType, WeightShape};
use crate::cpu::quantize::GROUP;

/// More registers per op than any program needs.
const MAX_REGISTERS_PER_OP: usize = 4;

pub(super) fn compile(
    specs: &[OpSpec],
    limits: &ProgramLimits,
    find: impl Fn(&str) -> Option<(usize, WeightShape)>,
) -> Result<Program, ProgramError> {
    let last_uses = last_uses(specs)?;
    let mut compiler = Compiler {
        limits: *limits,
        find,
        registers: vec![None; last_uses.len()],
        buffers: Vec::new(),
        free: Vec::new(),
    };
    let mut ops = Vec::with_capacity(specs.len());
    for (index, spec) in specs.iter().enumerate() {
        let op = compiler.op(spec).map_err(|ProgramError(reason)| {
            ProgramError(format!("op {index} ({} {:?}): {reason}", spec.kind, spec.weights))
        })?;
        let is_last = index + 1 == specs.len();
        if is_last != matches!(op, Op::Logits { .. }) {
            return wrong("the last op, and no other, gives the logits".to_owned());
        }
        ops.push(op);
        for &register in spec.inputs.iter().chain(&spec.outputs) {
            if last_uses[register] == index {
                compiler.release(register);
            }
        }
    }
    if ops.is_empty() {
        return wrong("the program is empty".to_owned());
    }
    Ok(Program { ops, buffers: compiler.buffers })
}

/// The last op that reads or writes each register.
fn last_uses(specs: &[OpSpec]) -> Result<Vec<usize>, ProgramError> {
    let mut last_uses = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        for &register in spec.inputs.iter().chain(&spec.outputs) {
            if register > specs.len() * MAX_REGISTERS_PER_OP {
                return wrong(format!("register {register} is out of range"));
            }
            if last_uses.len() <= register {
                last_uses.resize(register + 1, 0);
            }
            last_uses[register] = index;
        }
    }
    Ok(last_uses)
}

struct Compiler<F> {
    limits: ProgramLimits,
    find: F,
    /// Buffer of each register that was written and is still needed.
    registers: Vec<Option<usize>>,
    buffers: Vec<RegisterType>,
    /// Buffers that no register needs any more.
    free: Vec<usize>,
}

/// A weight matrix as ops see it.
#[derive(Clone, Copy, PartialEq)]
struct Matrix {
    index: usize,
    num_outputs: usize,
    num_inputs: usize,
    takes_quantized: bool,
}

fn wrong<T>(reason: String) -> Result<T, ProgramError> {
    Err(ProgramError(reason))
}

/// Exactly N operands.
fn operands<T: Clone, const N: usize>(what: &str, given: &[T]) -> Result<[T; N], ProgramError> {
    <[T; N]>::try_from(given.to_vec())
        .map_err(|_| ProgramError(format!("{} {what} instead of {N}", given.len())))
}

fn inputs<const N: usize>(spec: &OpSpec) -> Result<[usize; N], ProgramError> {
    operands("inputs", &spec.inputs)
}

fn outputs<const N: usize>(spec: &OpSpec) -> Result<[usize; N], ProgramError> {
    operands("outputs", &spec.outputs)
}

fn weights<const N: usize>(spec: &OpSpec) -> Result<[String; N], ProgramError> {
    operands("weights", &spec.weights)
}

impl<F: Fn(&str) -> Option<(usize, WeightShape)>> Compiler<F> {
    fn op(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        match spec.kind.as_str() {
            "embed" => self.embed(spec),
            "rms_norm" | "rms_norm_quantize" => self.norm(spec),
            "linear" => self.linear(spec),
            "add_linear" => self.add_linear(spec),
            "gated_linear" | "gated_linear_quantize" => self.gated_linear(spec),
            "quantize" => self.quantize(spec),
            "rope_store" => self.rope_store(spec),
            "attention" => self.attention(spec),
            "silu_mul" | "add" => self.elementwise(spec),
            "logits" | "norm_logits" => self.logits(spec),
            other => wrong(format!("there is no op {other:?}")),
        }
    }

    fn embed(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([], [out], [name]) = (inputs(spec)?, outputs(spec)?, weights(spec)?);
        let table = self.matrix(&name)?;
        let out = self.write(out, RegisterType::Float(table.num_inputs))?;
        Ok(Op::Embed { weight: table.index, out })
    }

    fn norm(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([x], [out], [name]) = (inputs(spec)?, outputs(spec)?, weights(spec)?);
        let (weight, width) = self.vector(&name)?;
        let x = self.read(x, RegisterType::Float(width))?;
        let out = self.write(out, result_type(spec, "rms_norm", width))?;
        Ok(Op::RmsNorm { x, weight, eps: spec.value, out })
    }

    fn add_linear(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([x, y], [out], [name]) = (inputs(spec)?, outputs(spec)?, weights(spec)?);
        let weight = self.matrix(&name)?;
        if out != x || x == y {
            return wrong("the sum is not in the place of the first input".to_owned());
        }
        let x = self.read(x, RegisterType::Float(weight.num_outputs))?;
        let y = self.read_input(y, &weight)?;
        Ok(Op::AddLinear { x, y, weight: weight.index })
    }

    fn gated_linear(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([x], [out], [gate, up]) = (inputs(spec)?, outputs(spec)?, weights(spec)?);
        let (gate, up) = (self.matrix(&gate)?, self.matrix(&up)?);
        if gate != (Matrix { index: gate.index, ..up }) {
            return wrong("the two weights differ in shape".to_owned());
        }
        let x = self.read_input(x, &gate)?;
        let out = self.write(out, result_type(spec, "gated_linear", gate.num_outputs))?;
        Ok(Op::GatedLinear { x, gate: gate.index, up: up.index, out })
    }

    fn quantize(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([x], [out]) = (inputs(spec)?, outputs(spec)?);
        let (x, width) = self.read_float(x)?;
        let out = self.write(out, RegisterType::Quantized(width))?;
        Ok(Op::Quantize { x, out })
    }

    fn rope_store(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([q, k, v], [out]) = (inputs(spec)?, outputs(spec)?);
        if out != q || q == k || k == v || q == v {
            return wrong("q is rotated in place, beside other k and v".to_owned());
        }
        let q = self.read(q, RegisterType::Float(self.limits.query_width))?;
        let k = self.read(k, RegisterType::Float(self.limits.kv_width))?;
        let v = self.read(v, RegisterType::Float(self.limits.kv_width))?;
        Ok(Op::RopeStore { q, k, v, layer: self.layer(spec)? })
    }

    fn attention(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([q], [out]) = (inputs(spec)?, outputs(spec)?);
        let layer = self.layer(spec)?;
        let width = RegisterType::Float(self.limits.query_width);
        let q = self.read(q, width)?;
        let out = self.write(out, width)?;
        Ok(Op::Attention { q, layer, scale: spec.value, out })
    }

    fn elementwise(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([a, b], [out]) = (inputs(spec)?, outputs(spec)?);
        let (a, width) = self.read_float(a)?;
        let b = self.read(b, RegisterType::Float(width))?;
        let out = self.write(out, RegisterType::Float(width))?;
        Ok(if spec.kind == "add" { Op::Add { a, b, out } } else { Op::SiluMul { gate: a, up: b, out } })
    }

    fn linear(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let [x] = inputs(spec)?;
        if spec.weights.is_empty() || spec.weights.len() != spec.outputs.len() {
            return wrong("not one output for each weight".to_owned());
        }
        let (mut input, mut weights, mut outs) = (0, Vec::new(), Vec::new());
        for (name, &out) in spec.weights.iter().zip(&spec.outputs) {
            let weight = self.matrix(name)?;
            input = self.read_input(x, &weight)?;
            weights.push(weight.index);
            outs.push(self.write(out, RegisterType::Float(weight.num_outputs))?);
        }
        Ok(Op::Linear { x: input, weights, outs })
    }

    fn logits(&mut self, spec: &OpSpec) -> Result<Op, ProgramError> {
        let ([x], []) = (inputs(spec)?, outputs(spec)?);
        let (norm, head) = if spec.kind == "norm_logits" {
            let [norm, head] = weights(spec)?;
            (Some(self.vector(&norm)?), head)
        } else {
            let [head] = weights(spec)?;
            (None, head)
        };
        let head = self.matrix(&head)?;
        if let Some((_, width)) = norm
            && width != head.num_inputs
        {
            return wrong(format!("a norm of {width} before a matrix of {} columns", head.num_inputs));
        }
        let x = self.read(x, RegisterType::Float(head.num_inputs))?;
        let norm = norm.map(|(weight, _)| (weight, spec.value));
        Ok(Op::Logits { x, norm, weight: head.index })
    }

    fn layer(&self, spec: &OpSpec) -> Result<usize, ProgramError> {
        usize::try_from(spec.layer)
            .ok()
            .filter(|&layer| layer < self.limits.num_layers)
            .ok_or_else(|| ProgramError(format!("layer {} of {}", spec.layer, self.limits.num_layers)))
    }

    fn matrix(&self, name: &str) -> Result<Matrix, ProgramError> {
        match (self.find)(name) {
            Some((index, WeightShape::Matrix { num_outputs, num_inputs, takes_quantized })) => {
                Ok(Matrix { index, num_outputs, num_inputs, takes_quantized })
            }
            Some(_) => wrong(format!("weight {name:?} is a vector")),
            None => wrong(format!("there is no weight {name:?}")),
        }
    }

    /// Index and length.
    fn vector(&self, name: &str) -> Result<(usize, usize), ProgramError> {
        match (self.find)(name) {
            Some((index, WeightShape::Vector(len))) => Ok((index, len)),
            Some(_) => wrong(format!("weight {name:?} is a matrix")),
            None => wrong(format!("there is no weight {name:?}")),
        }
    }

    fn buffer(&self, register: usize) -> Result<usize, ProgramError> {
        self.registers[register].ok_or_else(|| ProgramError(format!("register {register} holds nothing yet")))
    }

    fn read(&self, register: usize, expected: RegisterType) -> Result<usize, ProgramError> {
        let buffer = self.buffer(register)?;
        let actual = self.buffers[buffer];
        if actual != expected {
            return wrong(format!("register {register} holds {actual:?} instead of {expected:?}"));
        }
        Ok(buffer)
    }

    fn read_float(&self, register: usize) -> Result<(usize, usize), ProgramError> {
        let buffer = self.buffer(register)?;
        match self.buffers[buffer] {
            RegisterType::Float(width) => Ok((buffer, width)),
            RegisterType::Quantized(_) => wrong(format!("register {register} is quantized")),
        }
    }

    /// The input of a matrix: quantized only if the matrix takes that.
    fn read_input(&self, register: usize, weight: &Matrix) -> Result<usize, ProgramError> {
        let buffer = self.buffer(register)?;
        if weight.takes_quantized && self.buffers[buffer] == RegisterType::Quantized(weight.num_inputs) {
            return Ok(buffer);
        }
        self.read(register, RegisterType::Float(weight.num_inputs))
    }

    fn write(&mut self, register: usize, kind: RegisterType) -> Result<usize, ProgramError> {
        if self.registers[register].is_some() {
            return wrong(format!("register {register} is written twice"));
        }
        if let RegisterType::Quantized(width) = kind
            && !width.is_multiple_of(GROUP)
        {
            return wrong(format!("{width} numbers are not whole groups to quantize"));
        }
        let reused = self.free.iter().position(|&buffer| self.buffers[buffer] == kind);
        let buffer = if let Some(index) = reused {
            self.free.swap_remove(index)
        } else {
            self.buffers.push(kind);
            self.buffers.len() - 1
        };
        self.registers[register] = Some(buffer);
        Ok(buffer)
    }

    fn release(&mut self, register: usize) {
        if let Some(buffer) = self.registers[register].take() {
            self.free.push(buffer);
        }
    }
}

fn result_type(spec: &OpSpec, float_kind: &str, width: usize) -> RegisterType {
    if spec.kind == float_kind { RegisterType::Float(width) } else { RegisterType::Quantized(width) }
}
