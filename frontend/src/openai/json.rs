//! Request bodies to JSON objects, strictly: no duplicate keys, no byte order mark, no other
//! top-level value. Lone surrogate escapes become U+FFFD.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::ApiError;

/// Parses a request body.
pub(super) fn parse_object(mut body: Vec<u8>) -> Result<Map<String, Value>, ApiError> {
    if body.is_empty() {
        return Err(ApiError::malformed("The request body is empty; a JSON object is needed."));
    }
    if body.starts_with(b"\xEF\xBB\xBF") {
        return Err(ApiError::malformed("The request body must not begin with a byte order mark."));
    }
    replace_lone_surrogates(&mut body);
    let mut deserializer = serde_json::Deserializer::from_slice(&body);
    let value = StrictValue
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value))
        .map_err(|error| ApiError::malformed(format!("The request body is not valid JSON: {error}.")))?;
    match value {
        Value::Object(fields) => Ok(fields),
        _ => Err(ApiError::malformed("The request body must be a JSON object.")),
    }
}

/// Overwrites each `\uD800`-`\uDFFF` escape that is not half of a pair with `\ufffd`, in place.
fn replace_lone_surrogates(body: &mut [u8]) {
    let mut at = 0;
    while let Some(backslash) = body[at..].iter().position(|&byte| byte == b'\\') {
        at += backslash;
        match escaped_unit(&body[at..]) {
            Some(0xD800..=0xDBFF) if matches!(escaped_unit(&body[at + 6..]), Some(0xDC00..=0xDFFF)) => {
                at += 12;
            }
            Some(0xD800..=0xDFFF) => {
                body[at + 2..at + 6].copy_from_slice(b"fffd");
                at += 6;
            }
            // The byte after a backslash is never the start of an escape itself.
            _ => at = (at + 2).min(body.len()),
        }
    }
}

/// The code unit of a `\uXXXX` escape at the start of `bytes`.
fn escaped_unit(bytes: &[u8]) -> Option<u16> {
    let hex = bytes.strip_prefix(b"\\u")?.get(..4)?;
    hex.iter().try_fold(0, |unit, &digit| Some(unit << 4 | char::from(digit).to_digit(16)? as u16))
}

/// A JSON value in which no object names a key twice.
struct StrictValue;

impl<'de> DeserializeSeed<'de> for StrictValue {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictValue {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(StrictValue)? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(StrictValue)?;
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key {key:?} appears twice")));
            }
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(body: &str) -> Result<Map<String, Value>, ApiError> {
        parse_object(body.as_bytes().to_vec())
    }

    #[test]
    fn b56_lone_surrogates_become_replacement_characters() {
        let cases = [
            (r#"{"a":"x \ud83d y"}"#, "x \u{FFFD} y"),
            (r#"{"a":"\ude00"}"#, "\u{FFFD}"),
            (r#"{"a":"\ude00\ud83d"}"#, "\u{FFFD}\u{FFFD}"),
            (r#"{"a":"\ud83d\ude00"}"#, "\u{1F600}"),
            (r#"{"a":"\uD83D\uDE00\uD83D"}"#, "\u{1F600}\u{FFFD}"),
            (r#"{"a":"\ud83d\ud83d\ude00"}"#, "\u{FFFD}\u{1F600}"),
            (r#"{"a":"\\ud83d"}"#, "\\ud83d"),
            (r#"{"a":"\u0000"}"#, "\0"),
            (r#"{"a":"\ud83d\n"}"#, "\u{FFFD}\n"),
        ];
        for (body, expected) in cases {
            assert_eq!(parse(body).unwrap()["a"], expected, "{body}");
        }
    }

    #[test]
    fn b26_what_is_not_one_object_is_refused() {
        for body in [
            "[]",
            "true",
            "null",
            "12",
            "\"s\"",
            "",
            "{",
            "{\"a\":1,}",
            "{} x",
            "\u{FEFF}{}",
            "{\"a\":1,\"a\":2}",
        ] {
            assert!(parse(body).is_err(), "{body:?}");
        }
        assert!(parse_object(b"{\"a\":\"\xFF\"}".to_vec()).is_err());
        assert!(parse_object(vec![b' '; 1 << 20]).is_err());
        assert!(parse("{\"a\":{\"b\":1,\"b\":2}}").is_err(), "nested duplicate");
        assert!(parse(&format!("{{\"a\":{}", "[".repeat(100_000))).is_err(), "depth");
        assert!(parse("{\"a\":1e999}").is_err(), "out of range");
    }

    proptest! {
        #[test]
        fn any_bytes_give_an_answer(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_object(body);
        }

        #[test]
        fn escapes_decode_like_lossy_utf16(units in prop::collection::vec(prop_oneof![0xD700u16..0xE100, any::<u16>()], 0..12)) {
            let escapes: Vec<String> = units.iter().map(|unit| format!("\\u{unit:04x}")).collect();
            let parsed = parse(&format!("{{\"a\":\"{}\"}}", escapes.concat())).unwrap();
            prop_assert_eq!(parsed["a"].as_str().unwrap(), String::from_utf16_lossy(&units));
        }
    }
}
