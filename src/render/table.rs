//! Plain tables: a header line, right-aligned numbers, no frame.

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};

/// A table with these columns; those after the first `n_text` hold numbers.
pub(crate) fn table(columns: &[&str], n_text: usize, rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let cell = |i: usize, text: &str| {
        let alignment = if i < n_text { CellAlignment::Left } else { CellAlignment::Right };
        Cell::new(text).set_alignment(alignment)
    };
    table.set_header(columns.iter().enumerate().map(|(i, text)| cell(i, text)));
    for row in rows {
        table.add_row(row.iter().enumerate().map(|(i, text)| cell(i, text)));
    }
    table.trim_fmt()
}
