// The theme opens its search in a dialog without a name.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
