"""Runs in a sandbox of python-data-analysis: imports and uses each library and program, each in a process of its own.

Prints a line of JSON for each check: its name, its seconds, and why it failed. Names on the command line select checks.
"""

# mypy: ignore-errors

import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

PNG = b"\x89PNG"
LIMIT_S = 150  # seconds for one check, which takes a few; a busy host needs many times as long
CHECKS: dict[str, Callable[[], None]] = {}
TABLE = pd.DataFrame({"key": ["a", "b", "a", "b"] * 10, "x": np.arange(40.0), "y": np.arange(40.0) * 2 + 1})


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check, named as the function."""
    CHECKS[function.__name__] = function
    return function


def output(*argv: str, given: str = "") -> str:
    """Return what a program prints; it must succeed."""
    done = subprocess.run(argv, input=given, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{argv[0]} ended with {done.returncode}: {done.stderr[-500:]}"
    return done.stdout


# -- numbers ---------------------------------------------------------------------------------------------------


@check
def scipy():
    from scipy import integrate, optimize, stats

    assert abs(integrate.quad(np.sin, 0, np.pi)[0] - 2) < 1e-9
    assert abs(optimize.minimize(lambda p: (p[0] - 3) ** 2, [0.0]).x[0] - 3) < 1e-3
    assert stats.ttest_ind(TABLE.x, TABLE.x).pvalue == 1


@check
def sklearn():
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import cross_val_score

    x = TABLE[["x", "y"]].to_numpy()
    assert cross_val_score(RandomForestClassifier(9, random_state=0), x, x[:, 0] % 10 > 4, cv=2).shape == (2,)
    assert RandomForestClassifier(9, n_jobs=2, random_state=0).fit(x, x[:, 0] > 19).score(x, x[:, 0] > 19) == 1


@check
def statsmodels():
    import statsmodels.formula.api as smf

    assert abs(smf.ols("y ~ x", TABLE).fit().params["x"] - 2) < 1e-9


@check
def numba():
    from numba import njit

    @njit
    def total(n):
        result = 0
        for i in range(n):
            result += i
        return result

    assert total(1000) == 499500


@check
def sympy():
    from sympy import diff, integrate, sin, symbols

    x = symbols("x")
    assert integrate(x**2, (x, 0, 3)) == 9
    assert str(diff(sin(x))) == "cos(x)"


@check
def networkx():
    import networkx as nx

    assert nx.shortest_path(nx.path_graph(5), 0, 4) == [0, 1, 2, 3, 4]
    assert len(nx.spring_layout(nx.path_graph(5))) == 5


@check
def joblib():
    from joblib import Parallel, delayed

    assert Parallel(n_jobs=2)(delayed(abs)(-i) for i in range(4)) == [0, 1, 2, 3]


@check
def tqdm():
    from tqdm import tqdm as progress

    assert list(progress(range(3), file=io.StringIO())) == [0, 1, 2]


# -- tables ----------------------------------------------------------------------------------------------------


@check
def pyarrow():
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pandas(TABLE), "/tmp/t.parquet")
    assert pd.read_parquet("/tmp/t.parquet").equals(TABLE)


@check
def polars():
    import polars as pl

    found = pl.DataFrame({"k": ["a", "b", "a"], "v": [1, 2, 3]}).lazy().group_by("k").agg(pl.col("v").sum()).collect()
    assert dict(found.iter_rows()) == {"a": 4, "b": 2}


@check
def duckdb():
    import duckdb

    sales = TABLE  # noqa: F841 - found by its name
    assert duckdb.sql("select sum(x) from sales").fetchall() == [(780.0,)]


@check
def openpyxl():
    TABLE.to_excel("/tmp/t.xlsx", index=False, engine="openpyxl")
    assert pd.read_excel("/tmp/t.xlsx").shape == TABLE.shape


@check
def xlsxwriter():
    with pd.ExcelWriter("/tmp/w.xlsx", engine="xlsxwriter") as writer:
        TABLE.to_excel(writer, sheet_name="data")
        chart = writer.book.add_chart({"type": "line"})
        chart.add_series({"values": "=data!$C$2:$C$9"})
        writer.sheets["data"].insert_chart("F2", chart)
    assert Path("/tmp/w.xlsx").read_bytes().startswith(b"PK")


@check
def tabulate():
    assert "| key" in TABLE.to_markdown(index=False)


@check
def h5py():
    import h5py as h5

    with h5.File("/tmp/t.h5", "w") as file:
        file["x"] = TABLE.x.to_numpy()
        assert file["x"][:].sum() == 780


@check
def xarray():
    import xarray as xr

    assert float(xr.DataArray(np.ones((2, 3)), dims=("a", "b")).sum("b")[0]) == 3


@check
def tzdata():
    from zoneinfo import ZoneInfo

    import tzdata as data

    assert data.IANA_VERSION
    assert pd.Timestamp("2026-07-01", tz=ZoneInfo("Asia/Tokyo")).utcoffset().total_seconds() == 9 * 3600
    assert output("env", "TZ=Asia/Tokyo", "date", "+%z").strip() == "+0900"


@check
def pydantic():
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    assert Point.model_validate_json('{"x": "3"}').x == 3


@check
def yaml():
    import yaml as module

    assert module.safe_load("a: [1, 2]") == {"a": [1, 2]}


# -- pictures --------------------------------------------------------------------------------------------------


def drawn(text: str) -> bytes:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure()
    figure.text(0.1, 0.5, text)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


@check
def seaborn():
    import matplotlib as mpl

    mpl.use("Agg")
    import seaborn as sns

    sns.boxplot(TABLE, x="key", y="y").figure.savefig("/tmp/s.png")
    assert Path("/tmp/s.png").read_bytes().startswith(PNG)


@check
def fonts():
    import warnings

    from matplotlib import font_manager

    for family in ("DejaVu Sans", "Liberation Sans", "WenQuanYi Micro Hei"):
        assert font_manager.findfont(family, fallback_to_default=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Glyph missing from font"
        assert drawn("日本語 中文 한국어") != drawn("x")


@check
def plotly():
    import plotly.express as px

    figure = px.scatter(TABLE, x="x", y="y", color="key", title="Sales 日本")
    assert figure.to_image(format="png", width=400, height=300).startswith(PNG)
    assert "Sales" in figure.to_html(include_plotlyjs="cdn")


@check
def altair():
    import altair as alt

    chart = alt.Chart(TABLE).mark_line().encode(x="x", y="y")
    chart.save("/tmp/a.png")
    assert Path("/tmp/a.png").read_bytes().startswith(PNG)
    assert chart.to_dict()["mark"]["type"] == "line"


@check
def bokeh():
    from bokeh.embed import file_html
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    plot = figure(title="Bokeh")
    plot.line([1, 2], [3, 4])
    assert "Bokeh" in file_html(plot, INLINE)


@check
def folium():
    import folium as module

    assert "leaflet" in module.Map([52.5, 13.4]).get_root().render()


@check
def pillow():
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (60, 30))
    font = ImageFont.truetype("DejaVuSans.ttf", 12)
    ImageDraw.Draw(picture).text((2, 2), "hi", font=font)
    picture.save("/tmp/p.webp")
    assert Image.open("/tmp/p.webp").size == (60, 30)


@check
def cv2():
    import cv2 as cv

    edges = cv.Canny(np.eye(64, dtype=np.uint8) * 255, 50, 150)
    assert edges.any()
    assert cv.imencode(".png", edges)[1].tobytes().startswith(PNG)


@check
def skimage():
    from skimage import data, filters, measure

    assert filters.gaussian(data.camera()[:64, :64], 2).shape == (64, 64)
    assert measure.label(np.eye(4)).max() == 1


@check
def ffmpeg():
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.animation import FuncAnimation

    figure, axes = plt.subplots(figsize=(2, 2))
    FuncAnimation(figure, lambda i: axes.plot([0, i]), frames=3).save("/tmp/m.mp4", writer="ffmpeg")
    assert b"ftyp" in Path("/tmp/m.mp4").read_bytes()[:16]


# -- text and documents ----------------------------------------------------------------------------------------

PAGE = "<html><body><table><tr><th>a</th></tr><tr><td>1</td></tr></table><p>Bye</body></html>"


@check
def bs4():
    from bs4 import BeautifulSoup

    assert BeautifulSoup(PAGE, "lxml").p.text == BeautifulSoup(PAGE, "html5lib").p.text == "Bye"


@check
def lxml():
    from lxml import html

    assert html.fromstring(PAGE).xpath("//td/text()") == ["1"]


@check
def html5lib():
    import html5lib as module

    assert pd.read_html(io.StringIO(PAGE), flavor="html5lib")[0].shape == (1, 1)
    assert module.parse(PAGE) is not None


@check
def jinja2():
    from jinja2 import Template

    assert Template("{{ a + 1 }}").render(a=1) == "2"
    assert "<table" in TABLE.style.format(precision=1).to_html()


@check
def docx():
    import docx as module

    document = module.Document()
    document.add_heading("Report")
    document.save("/tmp/d.docx")
    assert module.Document("/tmp/d.docx").paragraphs[0].text == "Report"


@check
def pptx():
    from pptx import Presentation

    deck = Presentation()
    deck.slides.add_slide(deck.slide_layouts[0]).shapes.title.text = "Hello"
    deck.save("/tmp/d.pptx")
    assert Presentation("/tmp/d.pptx").slides[0].shapes.title.text == "Hello"


@check
def reportlab_and_pypdf():
    from pypdf import PdfReader
    from reportlab.pdfgen import canvas

    page = canvas.Canvas("/tmp/d.pdf")
    page.drawString(100, 700, "Invoice 42")
    page.save()
    assert "Invoice 42" in PdfReader("/tmp/d.pdf").pages[0].extract_text()


@check
def nltk():
    import nltk as module
    from nltk.corpus import stopwords, wordnet
    from nltk.sentiment import SentimentIntensityAnalyzer
    from nltk.stem import WordNetLemmatizer

    text = "The quick foxes jumped. They were happy!"
    assert module.sent_tokenize(text) == ["The quick foxes jumped.", "They were happy!"]
    assert module.word_tokenize(text)[-1] == "!"
    assert "the" in stopwords.words("english")
    assert dict(module.pos_tag(module.word_tokenize(text)))["jumped"] == "VBD"
    assert SentimentIntensityAnalyzer().polarity_scores("I love it")["compound"] > 0.5
    assert WordNetLemmatizer().lemmatize("geese") == "goose"
    assert wordnet.synsets("dog")[0].lexname() == "noun.animal"


# -- places ----------------------------------------------------------------------------------------------------


@check
def geopandas_and_shapely():
    import geopandas as gpd
    from shapely.geometry import Point

    points = gpd.GeoDataFrame({"n": [1]}, geometry=[Point(13.4, 52.5)], crs="EPSG:4326").to_crs("EPSG:3857")
    assert abs(points.geometry.x[0] - 1491681.0) < 1
    points.to_file("/tmp/g.geojson")
    assert len(gpd.read_file("/tmp/g.geojson")) == 1


# -- the web, without one --------------------------------------------------------------------------------------


@check
def requests_and_httpx():
    import threading
    from http.server import HTTPServer, SimpleHTTPRequestHandler

    import httpx
    import requests

    os.chdir("/etc")
    server = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/services"
    assert "https" in requests.get(address, timeout=10).text
    assert httpx.get(address).status_code == 200
    assert "https" in output("curl", "-sS", address)
    assert "https" in output("wget", "-qO-", address)


# -- programs --------------------------------------------------------------------------------------------------


@check
def pytest():
    Path("/tmp/test_one.py").write_text("def test_one():\n    assert True\n")
    assert "1 passed" in output("pytest", "-q", "-p", "no:cacheprovider", "/tmp/test_one.py")


@check
def pip():
    assert output("pip", "--version").startswith("pip ")
    listed = {package["name"].lower() for package in json.loads(output("pip", "list", "--format", "json"))}
    assert {"numpy", "scikit-learn", "pyyaml"} <= listed
    assert "Version: " in output("python", "-m", "pip", "show", "pandas")
    assert "No broken requirements" in output("pip", "check")


@check
def programs():
    for name in ("git", "make", "gcc", "file", "tree", "less", "xz", "zip", "unzip", "ps", "ipython", "ffmpeg"):
        assert output(name, "-version" if name == "ffmpeg" else "-v" if name in ("unzip", "zip") else "--version")
    assert output("python", "-c", "print(1)") == "1\n"
    assert "Mem:" in output("free", "-m")
    assert output("jq", ".a", given='{"a": 2}') == "2\n"
    assert output("sqlite3", ":memory:", "select 6 * 7") == "42\n"
    assert "<h1" in output("pandoc", "-t", "html", given="# Title\n")


@check
def gcc():
    Path("/tmp/c.c").write_text('#include <stdio.h>\nint main(void) { puts("built"); }\n')
    Path("/tmp/Makefile").write_text("c: c.c\n\tgcc -O1 -o c c.c\n")
    output("make", "-C", "/tmp")
    assert output("/tmp/c") == "built\n"


@check
def locales():
    assert {"C.utf8", "en_US.utf8"} <= {*output("locale", "-a").split()}
    import locale
    import socket

    locale.setlocale(locale.LC_ALL, "en_US.UTF-8")
    assert locale.format_string("%d", 1234567, grouping=True) == "1,234,567"
    assert socket.getservbyname("https") == 443


def failure(function: Callable[[], None]) -> str:
    """Run a check in a child, so that memory is given back; return why it failed, or nothing."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.close(reader)
        signal.alarm(LIMIT_S)
        try:
            function()
        except BaseException:
            os.write(writer, traceback.format_exc()[-1500:].encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return text or (f"ended with status {status}" if status else "")


if __name__ == "__main__":
    chosen = {name: CHECKS[name] for name in sys.argv[1:]} or CHECKS
    for name, function in chosen.items():
        began = time.monotonic()
        why = failure(function)
        print(json.dumps([name, round(time.monotonic() - began, 1), why]), flush=True)
