// Moves over the photo, clicks, presses keys and buttons, and writes down what the page says after each.
// Frames come by the clock: a headless browser whose time runs ahead draws too few of them.
window.requestAnimationFrame = f => setTimeout(f, 16);
addEventListener("load", async () => {
  const photo = document.getElementById("photo"), out = {};
  const pause = () => new Promise(done => setTimeout(done, 120));
  const note = async name => {
    await pause();
    out[name] = {};
    for (const dt of document.querySelectorAll("#facts dt")) out[name][dt.textContent] = dt.nextSibling.textContent;
  };
  const point = (type, x, y) => {
    const box = photo.getBoundingClientRect();
    const where = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
    photo.dispatchEvent(new PointerEvent(type, { bubbles: true, pointerType: "mouse", ...where }));
  };
  const press = (where, value) => document.querySelector(`#${where} button[data-${value}]`).click();
  await note("start");
  point("pointermove", 0.01, 0.01);
  await note("corner");
  point("pointerdown", 0.99, 0.99);
  point("pointermove", 0.5, 0.5);
  await note("pinned");
  photo.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true }));
  await note("up");
  press("heads", 'value="rows"');
  await note("rows");
  for (const mode of ["pale", "rollout", "cam"]) {
    press("modes", `value="${mode}"`);
    await note(mode);
  }
  press("strip", 'stage="1"');
  press("modes", 'value="attention"');
  await note("first");
  out.wide = document.documentElement.scrollWidth - innerWidth;
  const result = document.createElement("pre");
  result.id = "out";
  result.textContent = JSON.stringify(out);
  document.body.append(result);
});
