//! The building blocks of report pages. Text from outside always goes through [`Escaped`].

use std::fmt;
use std::io::{self, Write};

/// The page may show only its own content and fetch nothing.
const CONTENT_POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";

/// A name and a value, as text.
pub type Row = (String, String);

/// Writes the start of a page, up to its heading.
///
/// # Errors
/// From `out`.
pub fn write_head(title: &str, out: &mut impl Write) -> io::Result<()> {
    let title = Escaped(title);
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{CONTENT_POLICY}\">\n\
         <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n<h1>{title}</h1>\n",
        include_str!("report.css"),
    )
}

/// Writes the end of a page.
///
/// # Errors
/// From `out`.
pub fn write_end(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "</body>\n</html>")
}

/// Writes names and values side by side.
///
/// # Errors
/// From `out`.
pub fn write_rows(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "<dl class=\"facts\">")?;
    for (what, value) in rows {
        let (what, value) = (Escaped(what), Escaped(value));
        writeln!(out, "<div><dt>{what}</dt><dd>{value}</dd></div>")?;
    }
    writeln!(out, "</dl>")
}

/// Text escaped for HTML, in an element or in a quoted attribute.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                '\n' | '\t' => f.write_char(c)?,
                // HTML cannot represent them.
                c if c.is_control() => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Equivalent JSON that cannot end the script element around it.
pub fn for_script(json: &str) -> String {
    // These occur only in strings, where JSON allows the escaped form.
    json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

/// A cell of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Plain text.
    Text(String),
    /// A fraction of the total, 0 to 1; also shown as a bar.
    Share(f64),
}

/// A caption, the names of the columns, and rows whose first cell is their name.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Above the table.
    pub caption: &'static str,
    /// The first is the heading of the row names.
    pub columns: &'static [&'static str],
    /// With one cell for each column after the first.
    pub rows: Vec<(String, Vec<Cell>)>,
}

impl Table {
    /// Writes the table. Each cell also names its column, for narrow pages that show rows as lists.
    ///
    /// # Errors
    /// From `out`.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "<table>\n<caption>{}</caption>\n<thead><tr>", Escaped(self.caption))?;
        for column in self.columns {
            write!(out, "<th scope=\"col\">{}</th>", Escaped(column))?;
        }
        writeln!(out, "</tr></thead>\n<tbody>")?;
        for (name, cells) in &self.rows {
            write!(out, "<tr><th scope=\"row\">{}</th>", Escaped(name))?;
            for (cell, column) in cells.iter().zip(self.columns.iter().skip(1)) {
                let column = Escaped(column);
                match cell {
                    Cell::Text(text) => {
                        write!(out, "<td data-column=\"{column}\">{}</td>", Escaped(text))?;
                    }
                    Cell::Share(share) => {
                        let percent = 100.0 * share.clamp(0.0, 1.0);
                        let text = super::units::show_share(*share);
                        write!(
                            out,
                            "<td data-column=\"{column}\" class=\"share\" style=\"--share: \
                             {percent:.1}%\">{text}</td>"
                        )?;
                    }
                }
            }
            writeln!(out, "</tr>")?;
        }
        writeln!(out, "</tbody>\n</table>")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        let hostile = "<b onclick='f(\"&\")'>\0\u{1b}[2J\u{85}\ttab\nline";
        let expected = "&lt;b onclick=&#39;f(&quot;&amp;&quot;)&#39;&gt;\u{fffd}\u{fffd}[2J\u{fffd}\ttab\nline";
        assert_eq!(Escaped(hostile).to_string(), expected);
        let mut out = Vec::new();
        let rows = vec![(hostile.to_owned(), vec![Cell::Text(hostile.to_owned())])];
        Table { caption: "a", columns: &["b", "c"], rows }.write(&mut out).unwrap();
        write_rows(&[(hostile.to_owned(), hostile.to_owned())], &mut out).unwrap();
        write_head(hostile, &mut out).unwrap();
        let page = String::from_utf8(out).unwrap();
        assert_eq!(page.matches(expected).count(), 6, "{page}");
        assert!(!page.contains("<b "), "{page}");
    }
}
