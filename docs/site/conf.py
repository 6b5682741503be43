"""Configures Sphinx for the site that ``make docs`` builds; docs/make_site.py lays out the pages and starts it."""

import builtins
import re
import shutil
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).parent))

import docstrings

import shardwise
from shardwise.base.policy import Policy
from shardwise.config import keys

project = "Shardwise"
author = "The Shardwise contributors"
copyright = author
version = release = shardwise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "README"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

highlight_language = "text"  # a block without a language shows columns, not Python
myst_heading_anchors = 4  # the anchors that a repository page has

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_use_type_comments = (
    False  # the package has annotations, and looking for comments parses every function
)
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
add_module_names = False
viewcode_line_numbers = True

html_theme = "pydata_sphinx_theme"
html_title = f"Shardwise {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_favicon = "static/mark.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is, until the reader chooses
html_sidebars = {"README": []}
html_theme_options = {
    "logo": {"text": "Shardwise", "image_light": "static/mark.svg", "image_dark": "static/mark.svg"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 8,
    "collapse_navigation": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "github-light",
    "pygments_dark_style": "github-dark",
}


def convert_docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Replace a docstring by its reStructuredText, and add what a key of the configuration takes."""
    lines[:] = docstrings.convert(lines)
    if what == "attribute":
        module, owner, field = name.rsplit(".", 2)
        lines += of_key(getattr(sys.modules.get(module), owner, None), field)


def of_key(owner: Any, field: str) -> list[str]:
    """Return a sentence that says what a field of a policy takes, its unit and its default."""
    if not (isinstance(owner, type) and issubclass(owner, Policy)):
        return []
    key = keys_by_field(owner).get(field)
    if key is None:
        return []
    facts = [f"Takes: {docstrings.escape(key.kind)}"]
    facts += [f"unit: {key.unit}"] if key.unit else []
    facts += ["required"] if key.is_required else [f"default: ``{key.default}``"] if key.default else []
    return ["", f"{'; '.join(facts)}.", ""]


@cache
def keys_by_field(owner: type[Policy]) -> dict[str, keys.ConfigKey]:
    """Return the keys of a policy by the names of its fields."""
    return {key.path: key for key in keys.keys_of(owner)}


def skip_member(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what a library generates: fields of pydantic's models, validators, and texts of tuple fields."""
    is_text_of_tuple = "Alias for field number" in (getattr(thing, "__doc__", None) or "")
    is_validator = type(thing).__name__ == "PydanticDescriptorProxy"
    return True if name.startswith("model_") or is_text_of_tuple or is_validator else None


def sign(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str, str] | None:
    """Leave out the signature of a policy, which would repeat the fields that stand below it."""
    return ("", "") if isinstance(thing, type) and issubclass(thing, Policy) else None


class LinkedNames(SphinxPostTransform):
    """Links from names, such as ``plan/mesh.py`` in a sentence or ``Mesh`` in a signature, to what they name."""

    default_priority = 5  # before Sphinx resolves references

    def run(self, **kwargs: Any) -> None:
        """Replace each name of a documented object by a reference."""
        domain = self.env.domains["py"]
        assert isinstance(domain, PythonDomain)
        names = short_names(domain)
        last_parts = {name.rpartition(".")[2] for name in domain.objects}
        for literal in list(self.document.findall(nodes.literal)):
            if not is_linked(literal) and (name := full_name(domain, names, literal.astext())):
                literal.replace_self(self.reference(domain, name, [literal.deepcopy()]))
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("refdomain") != "py":
                continue
            target = node["reftarget"]
            if name := full_name(domain, names, target) or full_name(
                domain, names, target.rpartition(".")[2]
            ):
                node.replace_self(self.reference(domain, name, node.children))
            elif hasattr(builtins, target) or target.rpartition(".")[2] not in last_parts:
                # Sphinx would look for a member of that name in any class, and compare it with all names for that.
                node.replace_self(node.children)

    def reference(self, domain: PythonDomain, name: str, shown: list[nodes.Node]) -> nodes.reference:
        """Return a link from this page to an object."""
        entry = domain.objects[name]
        return make_refnode(self.app.builder, self.env.docname, entry.docname, entry.node_id, shown, name)


def is_linked(node: nodes.Node) -> bool:
    """Return True for code inside a link, a title or a signature."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.reference | nodes.title) or node.tagname.startswith(
            ("desc_sig", "pending")
        ):
            return True
    return False


def short_names(domain: PythonDomain) -> dict[str, str]:
    """Return the full name of each class by its last name, and of each member by ``Class.member``.

    No class name stands twice in the package, so that the last name is enough.
    """
    names: dict[str, str] = {}
    for name, entry in domain.objects.items():
        if entry.aliased:
            continue
        parts = name.split(".")
        if entry.objtype in ("class", "exception"):
            names[parts[-1]] = name
        elif entry.objtype in ("method", "attribute", "property") and parts[-2][:1].isupper():
            names[".".join(parts[-2:])] = name
    return names


def full_name(domain: PythonDomain, names: dict[str, str], text: str) -> str | None:
    """Return the full name of the object that a sentence calls by its file, its module, or a short name."""
    text = text.removesuffix("()")
    if re.fullmatch(r"(src/)?([a-z_]+/)+[a-z_0-9]+\.py", text):
        text = text.removeprefix("src/").removesuffix(".py").replace("/", ".")
    in_engine = names.get(re.sub(r"^engine\.", "Engine.", text), "")  # the pages call every engine ``engine``
    candidates = (in_engine, text, f"shardwise.{text}", names.get(text, ""))
    return next((name for name in candidates if "." in name and name in domain.objects), None)


def add_public_names(app: Sphinx, document: nodes.document) -> None:
    """Give each object on the page of public names a second anchor, such as ``shardwise.Engine``."""
    if app.env.docname != "docs/reference/engine":
        return
    domain = app.env.domains["py"]
    assert isinstance(domain, PythonDomain)
    for signature in document.findall(addnodes.desc_signature):
        name = f"shardwise.{signature['fullname']}"
        if name not in domain.objects:  # a function has several signatures if it has overloads
            signature["ids"].append(name)
            domain.note_object(name, signature.parent["objtype"], name, aliased=True, location=signature)


def drop_unreadable(app: Sphinx, document: nodes.document) -> None:
    """Remove values that Python shows by a type or an address in memory, and types that a key says in words.

    The default value ``os.environ`` stands under its name. Python shows it by all variables of whoever builds the site.
    """
    for node in list(document.findall(addnodes.desc_annotation)):
        text = node.astext()
        if (text.startswith(" = ") and "<" in text) or "Annotated[" in text:
            node.parent.remove(node)
    for node in list(document.findall(nodes.inline)):
        if "default_value" in node["classes"] and node.astext().startswith("environ("):
            node.children = [nodes.Text("os.environ")]


def correct_sources(app: Sphinx) -> list[Any]:
    """Correct the list of sources from which viewcode writes its pages.

    Each entry has the text of a module, its definitions, the page of each documented one, and the name by which their
    anchors begin. viewcode takes that name from the first object that it sees, which may be a class of another module
    that inherits a member; and it lists modules without a page, to which the index would link, and modules of Python
    and of torch if several processes read the pages.
    """
    domain = app.env.domains["py"]
    assert isinstance(domain, PythonDomain)
    sources = app.env._viewcode_modules
    for module, entry in list(sources.items()):
        if not entry or module.partition(".")[0] != shardwise.__name__:
            del sources[module]
            continue
        text, definitions, used, _ = entry
        places = {name: domain.objects.get(f"{module}.{name}") for name in used}
        used = {name: place.docname for name, place in places.items() if place is not None}
        sources[module] = (text, definitions, used, module)
    return []


def copy_indexes(app: Sphinx, failure: Exception | None) -> None:
    """Copy each README.html to index.html beside it, as a repository shows the README of a folder."""
    if failure is None:
        for page in Path(app.outdir).rglob("README.html"):
            shutil.copyfile(page, page.with_name("index.html"))


def setup(app: Sphinx) -> None:
    """Register the functions above, and make Sphinx read all pages again after a change of this folder's code."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    app.add_config_value("site_code", zlib.crc32(code), "env")
    app.connect("autodoc-process-docstring", convert_docstring)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-signature", sign)
    app.connect("doctree-read", add_public_names)
    app.connect("doctree-read", drop_unreadable)
    app.connect("html-collect-pages", correct_sources, priority=100)  # before viewcode writes its pages
    app.connect("build-finished", copy_indexes)
    app.add_post_transform(LinkedNames)
