//! Which form of message contents a template was written for.
//!
//! Lives here: the detection that vLLM does on a template's syntax tree, on the text instead.
//! Never here: rewriting the messages (`messages`).
//! Invariant: a template is [`ContentFormat::Parts`] exactly when it loops over the content of a
//! message it got from a loop over the messages, or over a variable called `content` (as newer
//! releases of vLLM have it, for templates that render contents in a macro).

/// How message contents reach the template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContentFormat {
    /// One string; the texts of several parts are joined by line ends. vLLM calls it `string`.
    Text,
    /// A list of `{"type": "text", "text": …}` parts. vLLM calls it `openai`.
    Parts,
}

impl ContentFormat {
    /// The format `template` was written for.
    #[must_use]
    pub fn detect(template: &str) -> ContentFormat {
        let statements: Vec<Statement> = statements(template).collect();
        let lists = aliases(&statements, "messages");
        let items: Vec<&str> = (statements.iter())
            .filter_map(|statement| statement.loop_over())
            .filter(|(_, access)| access.key.is_none() && lists.contains(&access.name))
            .map(|(target, _)| target)
            .collect();
        let looped = (statements.iter())
            .filter_map(|statement| statement.loop_over())
            .any(|(_, access)| match access.key {
                Some(key) => key == "content" && items.contains(&access.name),
                None => access.name == "content" && access.bare,
            });
        if looped {
            ContentFormat::Parts
        } else {
            ContentFormat::Text
        }
    }
}

/// A `{% for %}` or `{% set %}`: the name it binds and what it reads.
struct Statement<'t> {
    is_loop: bool,
    target: &'t str,
    access: Access<'t>,
}

impl<'t> Statement<'t> {
    fn loop_over(&self) -> Option<(&'t str, Access<'t>)> {
        self.is_loop.then_some((self.target, self.access))
    }
}

/// `name`, or one key of it, behind any filters and slices.
#[derive(Clone, Copy)]
struct Access<'t> {
    name: &'t str,
    key: Option<&'t str>,
    /// Whether there is no filter, slice or test.
    bare: bool,
}

/// `name` and every name it is assigned to, directly or through others.
fn aliases<'t>(statements: &[Statement<'t>], name: &'t str) -> Vec<&'t str> {
    let mut names = vec![name];
    let mut next = 0;
    while let Some(&known) = names.get(next) {
        next += 1;
        for statement in statements {
            let reads = statement.access.key.is_none() && statement.access.name == known;
            if !statement.is_loop && reads && !names.contains(&statement.target) {
                names.push(statement.target);
            }
        }
    }
    names
}

fn statements(template: &str) -> impl Iterator<Item = Statement<'_>> {
    template.split("{%").skip(1).filter_map(|block| {
        let inner = block.split("%}").next()?;
        let inner = inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        if let Some(head) = keyword(inner, "for") {
            let (target, expression) = head.split_once(" in ")?;
            Some(Statement {
                is_loop: true,
                target: target.trim(),
                access: access(expression, true)?,
            })
        } else {
            let (target, expression) = keyword(inner, "set")?.split_once('=')?;
            Some(Statement {
                is_loop: false,
                target: target.trim(),
                access: access(expression, false)?,
            })
        }
    })
}

/// What follows `word` and white space.
fn keyword<'t>(text: &'t str, word: &str) -> Option<&'t str> {
    let rest = text.strip_prefix(word)?;
    rest.starts_with(char::is_whitespace).then_some(rest)
}

/// Reads `name`, `name.key`, `name['key']`, each with slices, filters or a test behind it; `None`
/// for any other expression. A loop may go on with `if` or `recursive`.
fn access(expression: &str, is_loop: bool) -> Option<Access<'_>> {
    let expression = expression.trim_start();
    let (name, mut rest) = expression.split_at(identifier(expression));
    if name.is_empty() {
        return None;
    }
    let (mut key, mut sliced) = (None, false);
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix('.') {
            let (attribute, after) = after.split_at(identifier(after));
            if key.is_some() || after.starts_with('(') {
                return None;
            }
            (key, rest) = (Some(attribute), after);
        } else if let Some(after) = rest.strip_prefix('[') {
            let (index, after) = after.split_once(']')?;
            if !index.contains(':') {
                let name = index.trim().trim_matches(['\'', '"']);
                if key.is_some() || name.len() == index.trim().len() {
                    return None;
                }
                key = Some(name);
            } else {
                sliced = true;
            }
            rest = after;
        } else {
            break;
        }
    }
    let ends = rest.is_empty()
        || (is_loop && (keyword(rest, "if").is_some() || rest.starts_with("recursive")));
    let filtered = rest.starts_with('|') || keyword(rest, "is").is_some();
    (ends || filtered).then_some(Access {
        name,
        key,
        bare: ends && !sliced,
    })
}

/// Length of the identifier at the start.
fn identifier(text: &str) -> usize {
    text.find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_over_a_message_s_content_wants_parts() {
        for template in [
            "{% for message in messages %}{% for part in message['content'] %}{% endfor %}{% endfor %}",
            "{%- for m in messages[1:] if m -%}{%- for c in m.content | list -%}{% endfor %}{% endfor %}",
            "{% set rest = messages[1:] %}{% set loop_messages = rest %}
             {% for m in loop_messages %}{% for c in m[\"content\"] %}{% endfor %}{% endfor %}",
        ] {
            assert_eq!(
                ContentFormat::detect(template),
                ContentFormat::Parts,
                "{template}"
            );
        }
    }

    #[test]
    fn a_loop_over_a_variable_called_content_wants_parts() {
        let macro_loop =
            "{% macro render(content) %}{% for item in content %}{% endfor %}{% endmacro %}";
        assert_eq!(ContentFormat::detect(macro_loop), ContentFormat::Parts);
        let sliced =
            "{% macro render(content) %}{% for item in content[1:] %}{% endfor %}{% endmacro %}";
        assert_eq!(ContentFormat::detect(sliced), ContentFormat::Text);
        let other = "{% macro render(text) %}{% for item in text %}{% endfor %}{% endmacro %}";
        assert_eq!(ContentFormat::detect(other), ContentFormat::Text);
    }

    #[test]
    fn any_other_template_wants_text() {
        for template in [
            "",
            "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            "{% for message in messages %}{% for call in message.tool_calls %}{% endfor %}{% endfor %}",
            // Not a message of the conversation.
            "{% for part in system['content'] %}{% endfor %}{% for message in messages %}{% endfor %}",
            "{% for m in messages + extra %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% for c in m.content.split(',') %}{% endfor %}{% endfor %}",
            "{% for",
        ] {
            assert_eq!(
                ContentFormat::detect(template),
                ContentFormat::Text,
                "{template}"
            );
        }
    }
}
