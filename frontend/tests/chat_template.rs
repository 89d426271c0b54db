//! Chat prompts equal what Jinja2 with Hugging Face's settings renders.

#![expect(clippy::unwrap_used, reason = "tests")]

use rung_frontend::chat::{ChatTemplate, RenderInput, TemplateError, normalize_messages};
use serde_json::{Value, json};

fn render(source: &str, messages: Value) -> Result<String, TemplateError> {
    render_with(source, messages, true)
}

fn render_with(source: &str, messages: Value, add_generation_prompt: bool) -> Result<String, TemplateError> {
    let messages = normalize_messages(messages).unwrap();
    let input =
        RenderInput { messages: &messages, add_generation_prompt, bos_token: "<s>", eos_token: "</s>" };
    ChatTemplate::compile(source)?.render(input)
}

#[test]
fn prompts_equal_the_recorded_ones() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("fixtures/chat_prompts.json")).unwrap();
    assert!(cases.len() >= 18);
    for case in cases {
        let add = case["add_generation_prompt"].as_bool().unwrap();
        let rendered = render_with(case["template"].as_str().unwrap(), case["messages"].clone(), add);
        assert_eq!(rendered.as_deref(), Ok(case["rendered"].as_str().unwrap()), "{}", case["name"]);
    }
}

fn one(role: &str) -> Value {
    json!([{"role": role, "content": "x"}])
}

#[test]
fn b34_a_template_that_refuses_is_quoted_without_its_source() {
    let source =
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('Turns must alternate.') }}{% endif %}ok";
    assert_eq!(render(source, one("user")).unwrap(), "ok");
    assert_eq!(
        render(source, one("assistant")),
        Err(TemplateError::Raised("Turns must alternate.".to_owned()))
    );
    let error =
        render("{{ secret_name + messages[0].nothing.at.all }}", one("user")).unwrap_err().to_string();
    assert!(!error.contains("secret_name") && !error.contains("line"), "{error}");
}

#[test]
fn b34_developer_is_system_unless_the_template_knows_it() {
    assert_eq!(render("{{ messages[0].role }}", one("developer")).unwrap(), "system");
    assert_eq!(render("{# developer #}{{ messages[0].role }}", one("developer")).unwrap(), "developer");
}

#[test]
fn generation_tags_change_nothing_but_keep_whitespace_control() {
    let plain = "a {{ messages[0].content }} b\n c";
    assert_eq!(
        render("a {% generation %}{{ messages[0].content }}{% endgeneration %} b\n c", one("user")).unwrap(),
        render(plain, one("user")).unwrap()
    );
    assert_eq!(render("a {%- generation -%} x {%- endgeneration -%} b", one("user")).unwrap(), "axb");
    assert_eq!(render("{{ 'generation' }}{# generation #}", one("user")).unwrap(), "generation");
}

#[test]
fn b29_endless_templates_run_out_of_fuel() {
    let source = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    assert_eq!(render(source, one("user")), Err(TemplateError::TooLarge));
}

#[test]
fn ten_thousand_turns_render() {
    let messages: Vec<Value> = (0..10_000).map(|_| json!({"role": "user", "content": "x"})).collect();
    let source = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}";
    assert!(render(source, Value::Array(messages)).unwrap().len() > 100_000);
}

#[test]
fn python_names_are_there() {
    assert_eq!(render("{{ strftime_now('%Y') | length }}", one("user")).unwrap(), "4");
    assert_eq!(render("{{ bos_token }}{{ eos_token }}", one("user")).unwrap(), "<s></s>");
    assert!(matches!(render("{{ strftime_now('%Q') }}", one("user")), Err(TemplateError::Render(_))));
    assert!(matches!(ChatTemplate::compile("{% for %}"), Err(TemplateError::Compile(_))));
}
