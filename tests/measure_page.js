// What the layout of a page says: parts that stand outside its width (but for those that scroll by themselves), the
// text with the least contrast to what lies behind it, the lines of its figures, and what it loads.
addEventListener("load", () => {
  const numbers = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [red, green, blue] = color.map((value) => linear(value / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let place = element; place; place = place.parentElement) {
      const color = numbers(getComputedStyle(place).backgroundColor);
      if (color.length === 3 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const width = document.documentElement.clientWidth;
  const scrolls = (element) => element.parentElement && element.parentElement.closest(".scroll, [role=img]");
  const spills = (element) => element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1;
  const wide = [...document.querySelectorAll("body, body *")]
    .filter((element) => !scrolls(element) && !element.matches(".scroll, [role=img]"))
    .filter((element) => element.getBoundingClientRect().right > width + 0.5 || spills(element))
    .map((element) => `${element.tagName} ${element.textContent.trim().slice(0, 30)}`);
  const contrast = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const [text, element] = [texts.currentNode.data.trim(), texts.currentNode.parentElement];
    if (text && element.checkVisibility() && !["SCRIPT", "STYLE"].includes(element.tagName))
      contrast.push([ratio(numbers(getComputedStyle(element).color), behind(element)), text.slice(0, 40)]);
  }
  const strokes = [...document.querySelectorAll("[role=img] path")]
    .map((element) => getComputedStyle(element).stroke)
    .filter((stroke) => stroke !== "none")
    .map((stroke) => [ratio(numbers(stroke), behind(document.body)), stroke]);
  const loaded = [...document.querySelectorAll("[src], [href], [data], [srcset]")]
    .flatMap((element) => ["src", "href", "data", "srcset"].map((name) => element.getAttribute(name)))
    .filter((address) => address && !address.startsWith("#") && !address.startsWith("data:"));
  const told = document.createElement("pre");
  told.id = "measured";
  told.textContent = JSON.stringify({
    width,
    scroll: document.documentElement.scrollWidth,
    wide,
    loaded,
    strokes,
    texts: contrast.length,
    contrast: contrast.sort((a, b) => a[0] - b[0])[0],
  });
  document.body.append(told);
});
