from stretto.report.run_page import render_run as render_run

__all__: list[str]
