//! The fields that say how tokens are chosen. Bounds are OpenAI's where it has them, else the
//! engine's own.

use serde_json::Value;

use super::fields::Fields;
use super::validate::token_ids;
use crate::config::Limits;
use crate::engine::types::{Capability, ModelFacts, Sampling, TokenRules};
use crate::error::ApiError;

/// Rules on tokens as a request writes them: bad words are text that is still to be encoded.
#[derive(Debug, Clone, Default)]
pub(super) struct RequestedRules {
    pub rules: TokenRules,
    pub bad_words: Vec<String>,
}

/// A request that is silent about a parameter gets the model's own recommendation for it.
pub(super) fn sampling(fields: &mut Fields, facts: &ModelFacts) -> Result<Sampling, ApiError> {
    let default = &facts.default_sampling;
    // Other servers write "all tokens" as -1.
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.map(|top_k| top_k.max(0) as u32);
    let mut extra = |name, low, high, neutral, recommended: Option<f32>| {
        let asked = fields.number(name, low, high)?;
        let is_offered = facts.capabilities.has(Capability::SamplingExtra);
        if asked.is_some_and(|asked| differs(asked, neutral)) && !is_offered {
            return Err(not_offered(name));
        }
        // What changes nothing need not be sent.
        Ok(asked.or(recommended.filter(|_| is_offered)).filter(|value| differs(*value, neutral)))
    };
    let min_p = extra("min_p", 0.0, 1.0, 0.0, default.min_p)?;
    let typical_p = extra("typical_p", 0.0, 1.0, 1.0, default.typical_p)?;
    let repetition_penalty = extra("repetition_penalty", 0.0, 2.0, 1.0, default.repetition_penalty)?;
    let frequency_penalty = extra("frequency_penalty", -2.0, 2.0, 0.0, default.frequency_penalty)?;
    let presence_penalty = extra("presence_penalty", -2.0, 2.0, 0.0, default.presence_penalty)?;
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0, 2.0)?.or(default.temperature),
        top_k: top_k.or(default.top_k),
        top_p: above_zero("top_p", fields.number("top_p", 0.0, 1.0)?)?.or(default.top_p),
        seed: seed(fields)?,
        min_p,
        typical_p: above_zero("typical_p", typical_p)?,
        repetition_penalty: above_zero("repetition_penalty", repetition_penalty)?,
        frequency_penalty,
        presence_penalty,
    })
}

#[expect(clippy::float_cmp, reason = "the values that change nothing are exact")]
fn differs(value: f32, neutral: f32) -> bool {
    value != neutral
}

fn not_offered(name: &'static str) -> ApiError {
    ApiError::unsupported(name, format!("{name} is not offered by this engine; leave it out."))
}

fn above_zero(name: &'static str, value: Option<f32>) -> Result<Option<f32>, ApiError> {
    if value == Some(0.0) {
        return Err(ApiError::invalid(name, format!("{name} must be above 0.")));
    }
    Ok(value)
}

/// Any 64-bit integer, signed or not; negative ones by their bits.
fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else {
        return Ok(None);
    };
    match value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned)) {
        Some(seed) => Ok(Some(seed)),
        None => Err(ApiError::invalid("seed", "seed must be a 64-bit integer.")),
    }
}

/// Which tokens are favoured, allowed or forbidden.
pub(super) fn token_rules(
    fields: &mut Fields,
    facts: &ModelFacts,
    limits: &Limits,
) -> Result<RequestedRules, ApiError> {
    let requested = RequestedRules {
        rules: TokenRules {
            logit_bias: logit_bias(fields, facts)?,
            allowed_token_ids: allowed_token_ids(fields, facts)?,
            bad_words: Vec::new(),
        },
        bad_words: bad_words(fields, facts, limits)?,
    };
    let is_offered = facts.capabilities.has(Capability::SamplingExtra);
    match () {
        () if is_offered => Ok(requested),
        () if !requested.rules.logit_bias.is_empty() => Err(not_offered("logit_bias")),
        () if requested.rules.allowed_token_ids.is_some() => Err(not_offered("allowed_token_ids")),
        () if !requested.bad_words.is_empty() => Err(not_offered("bad_words")),
        () => Ok(requested),
    }
}

/// An object from token ids, which JSON makes strings, to what is added to their logits.
fn logit_bias(fields: &mut Fields, facts: &ModelFacts) -> Result<Vec<(u32, f32)>, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("logit_bias", message));
    let entries = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(entries)) => entries,
        Some(_) => return invalid("logit_bias must be an object from token ids to numbers.".to_owned()),
    };
    let most = facts.limits.max_logit_bias;
    if entries.len() > most as usize && facts.capabilities.has(Capability::SamplingExtra) {
        return invalid(format!("logit_bias names {} ids; at most {most} are allowed.", entries.len()));
    }
    let mut bias = Vec::with_capacity(entries.len());
    for (key, value) in &entries {
        let id = key.parse().ok().filter(|id| *id < facts.vocab_size);
        let value = value.as_f64().filter(|value| (-100.0..=100.0).contains(value));
        match (id, value) {
            (Some(id), Some(value)) => bias.push((id, value as f32)),
            (None, _) => {
                let last = facts.vocab_size.saturating_sub(1);
                return invalid(format!("logit_bias must name token ids from 0 to {last}."));
            }
            (_, None) => return invalid("logit_bias must hold numbers from -100 to 100.".to_owned()),
        }
    }
    bias.sort_unstable_by_key(|(id, _)| *id);
    // "7" and "07" are one id.
    if bias.array_windows().any(|[(one, _), (other, _)]| one == other) {
        return invalid("logit_bias names a token id twice.".to_owned());
    }
    Ok(bias)
}

fn allowed_token_ids(fields: &mut Fields, facts: &ModelFacts) -> Result<Option<Vec<u32>>, ApiError> {
    let name = "allowed_token_ids";
    let most = facts.limits.max_allowed_token_ids;
    match fields.take(name) {
        None => Ok(None),
        Some(Value::Array(items)) if items.is_empty() => {
            Err(ApiError::invalid(name, "allowed_token_ids must not be empty: no token could be chosen."))
        }
        Some(Value::Array(items))
            if items.len() > most as usize && facts.capabilities.has(Capability::SamplingExtra) =>
        {
            let message = format!("{name} holds {} ids; at most {most} are allowed.", items.len());
            Err(ApiError::invalid(name, message))
        }
        Some(Value::Array(items)) => token_ids(name, &items, facts.vocab_size).map(Some),
        Some(_) => Err(ApiError::invalid(name, "allowed_token_ids must be a list of token ids.")),
    }
}

fn bad_words(fields: &mut Fields, facts: &ModelFacts, limits: &Limits) -> Result<Vec<String>, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("bad_words", message));
    let items = match fields.take("bad_words") {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(_) => return invalid("bad_words must be a list of strings.".to_owned()),
    };
    // Each word is forbidden in two forms, with a space before it and without.
    let most = facts.limits.max_bad_words as usize / 2;
    if items.len() > most && facts.capabilities.has(Capability::SamplingExtra) {
        return invalid(format!("bad_words holds {} strings; at most {most} are allowed.", items.len()));
    }
    let word = |item| match item {
        Value::String(word) if !word.is_empty() && word.len() <= limits.max_stop_bytes => Some(word),
        _ => None,
    };
    let words: Option<Vec<String>> = items.into_iter().map(word).collect();
    match words {
        Some(words) => Ok(words),
        None => invalid(format!(
            "bad_words must hold strings that are not empty and have at most {} bytes.",
            limits.max_stop_bytes
        )),
    }
}

/// Higher runs first; 0 is what everyone has.
pub(super) fn priority(fields: &mut Fields, facts: &ModelFacts) -> Result<Option<u32>, ApiError> {
    let priority = fields.integer("priority", 0..=i64::from(u32::MAX))?.filter(|priority| *priority > 0);
    if priority.is_some() && !facts.capabilities.has(Capability::Priority) {
        return Err(not_offered("priority"));
    }
    Ok(priority.map(|priority| priority as u32))
}
