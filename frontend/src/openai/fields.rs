//! Typed access to the fields of a request object. `null` counts as absent, as in OpenAI's API;
//! every refusal names the field.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a request that have not been read yet.
pub(super) struct Fields {
    object: Map<String, Value>,
}

impl Fields {
    pub(super) fn new(object: Map<String, Value>) -> Self {
        Self { object }
    }

    /// The value as it came.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.object.remove(name).filter(|value| !value.is_null())
    }

    /// Looks without taking.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn string(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::invalid(name, format!("{name} must be a string."))),
        }
    }

    /// Absent is false.
    pub(super) fn flag(&mut self, name: &'static str) -> Result<bool, ApiError> {
        self.flag_or(name, false)
    }

    /// Absent is `default`.
    pub(super) fn flag_or(&mut self, name: &'static str, default: bool) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(_) => Err(ApiError::invalid(name, format!("{name} must be true or false."))),
        }
    }

    pub(super) fn integer(
        &mut self,
        name: &'static str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match integer_in(&value, &range) {
            Some(integer) => Ok(Some(integer)),
            None => Err(ApiError::invalid(name, format!("{name} must be an integer {}.", bounds(&range)))),
        }
    }

    /// A finite number from `low` to `high`.
    pub(super) fn number(
        &mut self,
        name: &'static str,
        low: f64,
        high: f64,
    ) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) if number >= low && number <= high => Ok(Some(number as f32)),
            _ => Err(ApiError::invalid(name, format!("{name} must be a number from {low} to {high}."))),
        }
    }
}

/// An integer beyond i64 saturates, so that a huge upper bound is still an upper bound.
fn integer_in(value: &Value, range: &RangeInclusive<i64>) -> Option<i64> {
    let integer = value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX))?;
    range.contains(&integer).then_some(integer)
}

fn bounds(range: &RangeInclusive<i64>) -> String {
    match (*range.start(), *range.end()) {
        (start, i64::MAX) => format!("of at least {start}"),
        (start, end) => format!("from {start} to {end}"),
    }
}
