//! Refuses what an engine has said that it cannot do, before anything is sent to it.
//!
//! Ranges of parameters are the engine's to check, as it checks all the rest again.

use super::types::{
    Capability, EngineError, EngineErrorCode, EngineLimits, GenerateRequest, ModelFacts, Sampling, TokenRules,
};

/// Whether the engine takes this request; one sentence if not.
pub(super) fn check_request(request: &GenerateRequest, facts: &ModelFacts) -> Result<(), EngineError> {
    let limits = &facts.limits;
    check_capabilities(request, facts)?;
    if request.samples == 0 || request.samples > limits.max_samples {
        return Err(invalid(format!(
            "A request may have 1 to {} samples on this engine, but it asks for {}.",
            limits.max_samples, request.samples
        )));
    }
    if request.prompt_ids.is_empty() {
        return Err(invalid("The prompt is empty; it needs at least one token.".to_owned()));
    }
    if request.prompt_ids.len() >= facts.max_model_len as usize {
        return Err(EngineError {
            code: EngineErrorCode::ContextLength,
            message: format!(
                "The prompt has {} tokens, but this model's context holds {} tokens, of which at least one is \
                 for the answer; shorten the prompt.",
                request.prompt_ids.len(),
                facts.max_model_len
            ),
        });
    }
    check_ids("The prompt holds token id", request.prompt_ids.iter(), facts)?;
    check_ids("Stop ids hold", request.stopping.stop_token_ids.iter(), facts)?;
    check_count("stop ids", request.stopping.stop_token_ids.len(), limits.max_stop_token_ids)?;
    for top_n in [request.top_logprobs, request.prompt_top_logprobs].into_iter().flatten() {
        if top_n > limits.max_top_logprobs {
            return Err(invalid(format!(
                "At most {} alternatives per token can be given, not {top_n}.",
                limits.max_top_logprobs
            )));
        }
    }
    check_token_rules(&request.token_rules, facts)?;
    check_bytes(request, limits)
}

fn check_capabilities(request: &GenerateRequest, facts: &ModelFacts) -> Result<(), EngineError> {
    let wanted = [
        (request.top_logprobs.is_some(), Capability::Logprobs, "give logprobs"),
        (request.prompt_top_logprobs.is_some(), Capability::PromptLogprobs, "give logprobs of the prompt"),
        (
            wants_sampling_extra(&request.sampling) || request.token_rules != TokenRules::default(),
            Capability::SamplingExtra,
            "take penalties, filters or rules on tokens beyond temperature, top_k and top_p",
        ),
        (request.grammar.is_some(), Capability::Grammar, "follow a grammar"),
        (
            request.priority.is_some() || request.deadline.is_some(),
            Capability::Priority,
            "take priorities and deadlines",
        ),
        (request.cache_salt.is_some(), Capability::PrefixCache, "take cache salts"),
    ];
    match wanted.iter().find(|(is_wanted, capability, _)| *is_wanted && !facts.capabilities.has(*capability))
    {
        Some((_, _, what)) => Err(invalid(format!("This engine cannot {what}; ask without that."))),
        None => Ok(()),
    }
}

fn wants_sampling_extra(sampling: &Sampling) -> bool {
    [
        sampling.min_p,
        sampling.typical_p,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    ]
    .iter()
    .any(Option::is_some)
}

fn check_token_rules(rules: &TokenRules, facts: &ModelFacts) -> Result<(), EngineError> {
    let limits = &facts.limits;
    check_count("ids with a bias", rules.logit_bias.len(), limits.max_logit_bias)?;
    check_ids("The logit bias names", rules.logit_bias.iter().map(|(id, _)| id), facts)?;
    if let Some(ids) = &rules.allowed_token_ids {
        check_count("allowed ids", ids.len(), limits.max_allowed_token_ids)?;
        check_ids("The allowed ids hold", ids.iter(), facts)?;
    }
    check_count("bad words", rules.bad_words.len(), limits.max_bad_words)?;
    for word in &rules.bad_words {
        check_count("tokens in a bad word", word.len(), limits.max_bad_word_tokens)?;
        check_ids("A bad word holds", word.iter(), facts)?;
    }
    Ok(())
}

fn check_bytes(request: &GenerateRequest, limits: &EngineLimits) -> Result<(), EngineError> {
    let grammar = request.grammar.as_ref().map_or(0, |grammar| grammar.len());
    let salt = request.cache_salt.as_ref().map_or(0, |salt| salt.len());
    check_count("bytes of a grammar, once compiled,", grammar, limits.max_grammar_bytes)?;
    check_count("bytes of a cache salt", salt, limits.max_cache_salt_bytes)
}

fn check_ids<'a>(
    what: &str,
    mut ids: impl Iterator<Item = &'a u32>,
    facts: &ModelFacts,
) -> Result<(), EngineError> {
    match ids.find(|id| **id >= facts.vocab_size) {
        Some(id) => Err(invalid(format!("{what} {id}, but ids must be below {}.", facts.vocab_size))),
        None => Ok(()),
    }
}

fn check_count(what: &str, count: usize, limit: u32) -> Result<(), EngineError> {
    if count <= limit as usize {
        return Ok(());
    }
    Err(invalid(format!("A request may have at most {limit} {what} on this engine, but it has {count}.")))
}

fn invalid(message: String) -> EngineError {
    EngineError { code: EngineErrorCode::InvalidArgument, message }
}
