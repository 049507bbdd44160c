// Search on pages opened as files, where browsers start no workers: a hidden frame runs the worker's script instead.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inside = frame.contentWindow, waiting = [];
    const tell = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
    this.postMessage = (data) => waiting.push(data);
    inside.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    };
    const script = inside.document.createElement("script");
    script.src = new URL(url, document.baseURI);
    script.onload = () => { this.postMessage = tell; waiting.forEach(tell); };
    inside.document.body.append(script);
  }
  terminate() {}
}
if (location.protocol === "file:") { window.IFrameWorker = window.Worker = IFrameWorker; }
