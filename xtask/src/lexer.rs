//! Just enough of Rust's lexical rules to tell code from comments and literals.

/// The source with each comment and literal replaced by a space. Line numbers do not change.
pub(crate) fn code_only(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut code = String::with_capacity(source.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skip(&chars, at);
        if end == at {
            code.push(chars[at]);
            at += 1;
            continue;
        }
        code.push(' ');
        code.extend(chars[at..end].iter().filter(|&&c| c == '\n'));
        at = end;
    }
    code
}

/// Where the comment or literal that starts at `at` ends; `at` itself if it is code.
fn skip(chars: &[char], at: usize) -> usize {
    let peek = |offset: usize| chars.get(at + offset).copied().unwrap_or('\0');
    match (peek(0), peek(1)) {
        ('/', '/') => find(chars, at, |c| c == '\n'),
        ('/', '*') => skip_block_comment(chars, at),
        ('"', _) => skip_quoted(chars, at, '"'),
        ('r', '"' | '#') if !follows_word(chars, at) => skip_raw_string(chars, at),
        ('b', 'r') if !follows_word(chars, at) => match skip_raw_string(chars, at + 1) {
            end if end == at + 1 => at,
            end => end,
        },
        // A quote starts a character unless it names a lifetime: 'a' or '\n', but not 'a.
        ('\'', '\\') => skip_quoted(chars, at, '\''),
        ('\'', _) if peek(2) == '\'' => at + 3,
        _ => at,
    }
}

fn find(chars: &[char], from: usize, wanted: impl Fn(char) -> bool) -> usize {
    let found = chars[from..].iter().position(|&c| wanted(c));
    found.map_or(chars.len(), |offset| from + offset)
}

fn follows_word(chars: &[char], at: usize) -> bool {
    at > 0 && is_word(chars[at - 1])
}

fn skip_block_comment(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at + 1 < chars.len() {
        match (chars[at], chars[at + 1]) {
            ('/', '*') => (depth, at) = (depth + 1, at + 2),
            ('*', '/') => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    chars.len()
}

fn skip_quoted(chars: &[char], start: usize, quote: char) -> usize {
    let mut at = start + 1;
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            c if c == quote => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// `r"…"`, `r#"…"#` and so on; a raw identifier such as `r#type` is code.
fn skip_raw_string(chars: &[char], start: usize) -> usize {
    let open = find(chars, start + 1, |c| c != '#');
    if chars.get(open) != Some(&'"') {
        return start;
    }
    let hashes = open - start - 1;
    let mut at = open + 1;
    while at < chars.len() {
        at = find(chars, at, |c| c == '"') + 1;
        let closing = chars.iter().skip(at).take_while(|&&c| c == '#').count();
        if closing >= hashes {
            return (at + hashes).min(chars.len());
        }
    }
    chars.len()
}

/// Whether `word` occurs in `line` as a whole word, not next to a letter, digit or underscore.
pub(crate) fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && (!after.is_some_and(is_word) || !ends_as_word(word))
    })
}

fn ends_as_word(word: &str) -> bool {
    word.chars().next_back().is_some_and(is_word)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, code: &str) {
        assert_eq!(code_only(source), code, "{source}");
    }

    #[test]
    fn blanks_comments() {
        check("a // b\nc", "a  \nc");
        check("a /* b /* c */ d\n */ e", "a  \n e");
        check("/* open", " ");
    }

    #[test]
    fn blanks_literals() {
        check(r#"f("a \" b", c)"#, "f( , c)");
        check("f(\"a\nb\") + c", "f( \n) + c");
        check(r###"f(r#"a " b"#, c)"###, "f( , c)");
        check(r###"f(br##"a "# b"##, c)"###, "f( , c)");
        check(r"f('\'', '{', '\n', x)", "f( ,  ,  , x)");
        check("\"open", " ");
    }

    #[test]
    fn keeps_lifetimes_and_raw_identifiers() {
        check("fn f<'a>(x: &'a T)", "fn f<'a>(x: &'a T)");
        check("r#type + for_r + bring", "r#type + for_r + bring");
        check("a / b", "a / b");
    }

    #[test]
    fn finds_whole_words() {
        assert!(has_word("an unsafe block", "unsafe"));
        assert!(has_word("unsafe{", "unsafe"));
        assert!(!has_word("deny(unsafe_code)", "unsafe"));
        assert!(!has_word("not_unsafe", "unsafe"));
        assert!(has_word("x = dbg!(y)", "dbg!"));
        assert!(!has_word("mydbg!(y)", "dbg!"));
    }
}
