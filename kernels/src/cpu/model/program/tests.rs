//! Programs that compile, and what is refused.

use super::RegisterType::{Float, Quantized};
use super::*;

const LIMITS: ProgramLimits = ProgramLimits { num_layers: 2, query_width: 64, kv_width: 32 };

fn spec(kind: &str, inputs: &[usize], weights: &[&str], outputs: &[usize]) -> OpSpec {
    OpSpec {
        kind: kind.to_owned(),
        inputs: inputs.to_vec(),
        weights: weights.iter().map(|&name| name.to_owned()).collect(),
        outputs: outputs.to_vec(),
        layer: 1,
        value: 0.5,
    }
}

/// "a<outputs>x<inputs>": a matrix; with a leading "i" it takes quantized inputs; "v<len>".
fn find(name: &str) -> Option<(usize, WeightShape)> {
    if let Some(len) = name.strip_prefix('v') {
        return Some((0, WeightShape::Vector(len.parse().ok()?)));
    }
    let takes_quantized = name.starts_with('i');
    let (outputs, inputs) = name.get(1..)?.split_once('x')?;
    let shape = WeightShape::Matrix {
        num_outputs: outputs.parse().ok()?,
        num_inputs: inputs.parse().ok()?,
        takes_quantized,
    };
    Some((outputs.len(), shape))
}

fn compile(specs: &[OpSpec]) -> Result<Program, ProgramError> {
    Program::compile(specs, &LIMITS, find)
}

fn good() -> Vec<OpSpec> {
    vec![
        spec("embed", &[], &["a99x96"], &[0]),
        spec("rms_norm_quantize", &[0], &["v96"], &[1]),
        spec("linear", &[1], &["i64x96", "i32x96", "i32x96"], &[2, 3, 4]),
        spec("rope_store", &[2, 3, 4], &[], &[2]),
        spec("attention", &[2], &[], &[5]),
        spec("add_linear", &[0, 5], &["a96x64"], &[0]),
        spec("rms_norm", &[0], &["v96"], &[6]),
        spec("gated_linear_quantize", &[6], &["i128x96", "i128x96"], &[7]),
        spec("add_linear", &[0, 7], &["i96x128"], &[0]),
        spec("norm_logits", &[0], &["v96", "a99x96"], &[]),
    ]
}

#[test]
fn a_program_compiles_and_buffers_are_used_again() {
    let program = compile(&good()).unwrap();
    assert_eq!(program.ops.len(), good().len());
    // The hidden state, the normed input twice, queries and answers, keys, values, the MLP.
    let mut expected =
        vec![Float(96), Quantized(96), Float(64), Float(32), Float(32), Float(64), Float(96), Quantized(128)];
    assert_eq!(program.buffers, expected);
    // A second layer needs no more.
    let mut longer = good();
    let layer: Vec<OpSpec> = longer[1..9].to_vec();
    longer.splice(
        9..9,
        layer.into_iter().map(|mut op| {
            for register in op.inputs.iter_mut().chain(&mut op.outputs) {
                *register += if *register == 0 { 0 } else { 10 };
            }
            op
        }),
    );
    expected.truncate(8);
    assert_eq!(compile(&longer).unwrap().buffers, expected);
}

#[test]
fn what_does_not_fit_is_refused_with_the_op() {
    let cases: [(usize, OpSpec, &str); 14] = [
        (0, spec("embed", &[], &["v96"], &[0]), "is a vector"),
        (1, spec("rms_norm", &[0], &["v95"], &[1]), "holds Float(96) instead of Float(95)"),
        (1, spec("rms_norm", &[9], &["v96"], &[1]), "register 9 holds nothing yet"),
        (1, spec("rms_norm", &[0], &["nothing"], &[1]), "there is no weight"),
        (1, spec("rms_norm", &[0, 0], &["v96"], &[1]), "2 inputs instead of 1"),
        (1, spec("fly", &[0], &[], &[1]), "there is no op \"fly\""),
        (2, spec("linear", &[1], &["a64x96"], &[2]), "holds Quantized(96)"),
        (2, spec("linear", &[1], &["i64x96", "i32x96"], &[2]), "not one output for each weight"),
        (3, spec("rope_store", &[2, 3, 3], &[], &[2]), "rotated in place"),
        (3, spec("rope_store", &[2, 3, 4], &[], &[8]), "rotated in place"),
        (5, spec("add_linear", &[0, 5], &["a96x64"], &[8]), "not in the place"),
        (6, spec("rms_norm", &[0], &["v96"], &[0]), "register 0 is written twice"),
        (7, spec("gated_linear", &[6], &["a128x96", "i128x96"], &[7]), "differ in shape"),
        (9, spec("norm_logits", &[0], &["v95", "a99x96"], &[]), "a norm of 95"),
    ];
    for (index, op, expected) in cases {
        let mut specs = good();
        specs[index] = op;
        let message = compile(&specs).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        assert!(message.starts_with(&format!("op {index} (")), "{message}");
    }
}

#[test]
fn a_layer_that_does_not_exist_is_refused() {
    let mut specs = good();
    for layer in [-1, 2] {
        specs[4].layer = layer;
        assert!(compile(&specs).unwrap_err().to_string().contains(&format!("layer {layer} of 2")));
    }
}

#[test]
fn logits_come_last_and_once() {
    assert!(compile(&[]).is_err());
    assert!(compile(&good()[..9]).is_err());
    let twice = [good(), good()[9..].to_vec()].concat();
    assert!(compile(&twice).is_err());
}
