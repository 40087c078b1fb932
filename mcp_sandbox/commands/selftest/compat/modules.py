"""The modules that a sandbox for data analysis must be able to import, separated by white space."""

STANDARD = """
argparse array ast asyncio base64 bisect calendar cmath collections concurrent.futures configparser contextlib copy csv
ctypes curses dataclasses datetime decimal difflib email enum fractions functools glob gzip hashlib heapq html.parser
http.client inspect io itertools json logging lzma math multiprocessing numbers operator pathlib pickle platform random
re readline secrets select shutil signal socket sqlite3 ssl statistics string struct subprocess tarfile tempfile
threading time timeit traceback typing unicodedata unittest urllib.request uuid venv xml.etree.ElementTree zipfile
zoneinfo
"""

LIBRARIES = """
IPython PIL altair bokeh bs4 cv2 docx duckdb geopandas h5py html5lib httpx jinja2 joblib lxml matplotlib.pyplot
networkx nltk numba numpy openpyxl pandas plotly polars pptx pyarrow pydantic pypdf pytest reportlab requests scipy
seaborn shapely skimage sklearn statsmodels.api sympy tabulate tqdm tzdata xarray xlsxwriter yaml
"""
