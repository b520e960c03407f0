"""What results say: sentences, tables, charts and one page."""
