//! Extracts the text of an HTML page.

/// Elements whose content is not visible text of the page.
const SILENT: [&str; 4] = ["script", "style", "head", "nav"];

/// Elements that end a line.
const BREAKS: [&str; 14] =
    ["p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "dt", "dd"];

/// The visible text of a page: without tags, and with common character references replaced.
pub(super) fn text(page: &str) -> String {
    let mut text = String::with_capacity(page.len() / 2);
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        push_characters(&rest[..at], &mut text);
        rest = &rest[at..];
        if let Some(comment) = rest.strip_prefix("<!--") {
            rest = after(comment, "-->");
            continue;
        }
        let tag = tag_name(rest);
        rest = after(rest, ">");
        if SILENT.contains(&tag.as_str()) {
            rest = after(rest, &format!("</{tag}>"));
        }
        let name = tag.trim_start_matches('/');
        if BREAKS.contains(&name) && !text.ends_with("\n\n") {
            text.push('\n');
        }
    }
    push_characters(rest, &mut text);
    text
}

/// The text after the first `mark`. Empty if there is none.
fn after<'t>(text: &'t str, mark: &str) -> &'t str {
    text.find(mark).map_or("", |at| &text[at + mark.len()..])
}

/// The name of a tag: `p`, or `/p` for an end tag.
fn tag_name(tag: &str) -> String {
    let inner = tag.trim_start_matches('<');
    let end = inner.find(|c: char| c.is_whitespace() || c == '>').unwrap_or(inner.len());
    inner[..end].trim_end_matches('/').to_ascii_lowercase()
}

fn push_characters(mut raw: &str, text: &mut String) {
    while let Some(at) = raw.find('&') {
        text.push_str(&raw[..at]);
        raw = &raw[at..];
        let end = raw.find(';').filter(|&end| end <= 8);
        let Some((end, character)) = end.and_then(|end| Some((end, reference(&raw[1..end])?)))
        else {
            text.push('&');
            raw = &raw[1..];
            continue;
        };
        text.push(character);
        raw = &raw[end + 1..];
    }
    text.push_str(raw);
}

fn reference(name: &str) -> Option<char> {
    if let Some(number) = name.strip_prefix('#') {
        let code = match number.strip_prefix(['x', 'X']) {
            Some(hexadecimal) => u32::from_str_radix(hexadecimal, 16).ok()?,
            None => number.parse().ok()?,
        };
        // A non-breaking space becomes a plain space.
        return char::from_u32(code).map(|c| if c == '\u{a0}' { ' ' } else { c });
    }
    let known =
        [("amp", '&'), ("lt", '<'), ("gt", '>'), ("quot", '"'), ("apos", '\''), ("nbsp", ' ')];
    known.iter().find(|(known, _)| *known == name).map(|&(_, character)| character)
}

#[cfg(test)]
mod tests {
    use super::text;

    #[track_caller]
    fn check(page: &str, expected: &str) {
        assert_eq!(text(page), expected, "of {page:?}");
    }

    #[test]
    fn tags_go_and_characters_come_back() {
        check("a <b>bold</b> word", "a bold word");
        check("<p>one</p><p>two</p>", "\none\n\ntwo\n");
        check("1 &lt; 2 &amp;&amp; x&#46;y&#x41;", "1 < 2 && x.yA");
        check("AT&T, &unknown; and &#xD800;", "AT&T, &unknown; and &#xD800;");
        check("<script>if (a < b) {}</script>x<!-- <p>y -->z", "xz");
        check("cut <b", "cut ");
        check("<style>never closed", "");
    }
}
