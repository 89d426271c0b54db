//! The Python names that chat templates expect beside Jinja's own: `tojson` as `json.dumps`
//! writes it, `strftime_now`, `raise_exception`.

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use time::OffsetDateTime;

/// Starts the detail of an error that the template itself raised.
pub(super) const RAISED: &str = "raised by the chat template: ";

/// Adds all of them.
pub(super) fn add_python_names(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

/// Local time where the system tells it, else UTC.
fn strftime_now(format: String) -> Result<String, Error> {
    let error = |reason: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {reason}"));
    let now = OffsetDateTime::now_local().unwrap_or_else(|_| OffsetDateTime::now_utc());
    let items = time::format_description::parse_strftime_borrowed(&format)
        .map_err(|reason| error(reason.to_string()))?;
    now.format(&items).map_err(|reason| error(reason.to_string()))
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`: no HTML escapes, spaces after `,` and `:`.
fn to_json(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    // Templates pass these with the values that hold anyway.
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    let _: Option<Value> = kwargs.get("separators")?;
    let _: Option<bool> = kwargs.get("sort_keys")?;
    kwargs.assert_all_used()?;
    let mut json = Vec::new();
    let spaces = " ".repeat(indent.unwrap_or_default().min(16));
    let outcome = match indent {
        Some(_) => value.serialize(&mut Serializer::with_formatter(
            &mut json,
            PrettyFormatter::with_indent(spaces.as_bytes()),
        )),
        None => value.serialize(&mut Serializer::with_formatter(&mut json, PythonFormatter)),
    };
    outcome.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let json = String::from_utf8(json)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from_safe_string(json))
}

/// One line, with the spaces that Python's encoder writes.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
